"""How a command speaks of a run's end: why it failed is said once, whole, on stderr, with where the log is and how to go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rftcli.cli.watch import finish
from rftcli.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUME, EXIT_STOPPED
from rftcli.events import CheckpointSaved, RunEnded, RunStarted, StepDone, to_line
from rftcli.runtime.launch import Outcome
from rftcli.runtime.rundir import COMMITTED, RunDir, State, commit_text

CAUSE = "rank 1: no row for this answer\nhint: look at the samples\nlog: /runs/q/attempts/1/logs/rank_1.log"
SAVED = "hint: `rft resume {run}` goes on from step_000002\n"


def ended(path: Path, status: str, *, step: int = 3, cause: str | None = CAUSE, saved: bool = True) -> tuple[RunDir, State]:
    """A run of 9 steps that ended after `step`."""
    run, state = RunDir(path / "run"), State(status=status, step=step, attempt=1, cause=cause)
    run.create()
    run.write_state(state)
    events = [RunStarted(time=0.0, attempt=1, step=0, info={"steps": 9}), StepDone(time=1.0, attempt=1, step=3, metrics={"reward_mean": 0.5})]
    if saved:
        folder = run.checkpoints / "step_000002"
        folder.mkdir(parents=True)
        (folder / COMMITTED).write_text(commit_text(2, 1))
        events.append(CheckpointSaved(time=1.0, attempt=1, step=2, path=str(folder), seconds=0.1))
    events.append(RunEnded(time=2.0, attempt=1, step=step, status=status, cause=cause))
    run.events.write_text("".join(to_line(event) + "\n" for event in events))
    return run, state


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "step", "said"),
    [
        ("failed", EXIT_FAILED, 3, "error: the run failed after step 3: {cause}\n" + SAVED),
        ("failed", EXIT_FAILED, 0, "error: the run failed before its first step was over: {cause}\n" + SAVED),
        ("stopped", EXIT_STOPPED, 3, "stopped: {cause}\n" + SAVED),
        ("failed", EXIT_RESUME, 3, "error: resume refused: {cause}\n"),
        ("done", EXIT_OK, 3, ""),
    ],
)
def test_why_and_how_to_go_on_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str, code: int, step: int, said: str, as_json: bool
) -> None:
    run, state = ended(tmp_path, status, step=step, cause=CAUSE if code else None)
    assert finish(run, Outcome(exit_code=code, state=state), as_json=as_json) == code
    out, err = capsys.readouterr()
    assert err == said.format(cause=CAUSE, run=run.path)
    if as_json:
        assert json.loads(out)["cause"] == (CAUSE if code else None)
    else:
        assert out.startswith(f"{status}: 3 of 9 steps in 2.0s\n") and "no row" not in out and "rft resume" not in out


def test_nothing_to_go_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, state = ended(tmp_path, "failed", saved=False)
    finish(run, Outcome(exit_code=EXIT_FAILED, state=state), as_json=False, what="evaluation")
    assert capsys.readouterr().err == f"error: the evaluation failed: {CAUSE}\n"
