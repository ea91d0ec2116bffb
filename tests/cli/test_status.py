"""`rft status`: how a run stands, from its files alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rftcli.cli.main import main
from rftcli.events import EvalDone, Event, RunStarted, StepDone, Warned, to_line
from rftcli.runtime.rundir import RunDir, State

SETS = {"held_out": {"mean@1": {"value": 0.5, "low": 0.4, "high": 0.6}, "prompts": 8}}


def run_of(path: Path, *events: Event) -> Path:
    run = RunDir(path / "run")
    run.create()
    run.write_state(State(status="done", step=2, attempt=1))
    run.events.write_text("".join(to_line(event) + "\n" for event in events))
    return run.path


def step(number: int, **metrics: Any) -> StepDone:
    return StepDone(time=1.0, attempt=1, step=number, metrics=metrics)


def warned(number: int, code: str, text: str) -> Warned:
    return Warned(time=1.0, attempt=1, step=number, code=code, text=text)


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["status", *arguments])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_last_step_the_last_evaluation_and_all_warnings_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(
        tmp_path,
        RunStarted(time=1.0, attempt=1, step=0, info={"steps": 9}),
        warned(0, "slow_disk", "the disk is slow"),
        step(1, reward_mean=0.25),
        step(2, reward_mean=0.5, kl=math.nan, seconds={"total": 2.0}),
        warned(2, "truncated", "half of the answers are cut"),
        EvalDone(time=1.0, attempt=1, step=2, sets=SETS, seconds=1.0),
    )
    found = json.loads(status(capsys, str(run), "--json"))
    assert (found["status"], found["step"], found["steps"], found["dead"]) == ("done", 2, 9, False)
    last = {"time": 1.0, "attempt": 1, "step": 2}
    assert found["last_step"] == last | {"reward_mean": 0.5, "kl": "nan", "seconds": {"total": 2.0}}
    assert found["last_eval"] == last | {"sets": SETS, "seconds": 1.0}
    assert [(one["step"], one["code"], one["text"]) for one in found["warnings"]] == [
        (0, "slow_disk", "the disk is slow"),
        (2, "truncated", "half of the answers are cut"),
    ]


def test_a_run_without_a_step_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(status(capsys, str(run_of(tmp_path)), "--json"))
    assert (found["last_step"], found["last_eval"], found["warnings"], found["steps"]) == (None, None, [], None)
    (tmp_path / "run" / "events.jsonl").unlink()
    assert json.loads(status(capsys, str(tmp_path / "run"), "--json"))["warnings"] == []


def test_the_last_warnings_are_shown_with_their_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every code the last one, three codes at most."""
    many = [warned(number, code, f"{code} {number}") for number, code in enumerate(["a", "b", "b", "c", "a", "d"], start=1)]
    shown = status(capsys, str(run_of(tmp_path, step(1, reward_mean=math.nan), *many)))
    assert "reward nan (step 1)\nwarnings a x2, b x2, c x1, d x1\n  step 4 c: c 4\n  step 5 a: a 5\n  step 6 d: d 6\n" in shown


SECONDS = {"rollout": 6.0, "score": 0.04, "credit": 0.06, "learn": 3.0, "sync": 0.0, "eval": 0.5, "checkpoint": 0.1, "other": 0.3, "total": 10.0}
SPLIT = "step 2 took 10.0s: rollout 60%, learn 30%, eval 5%, other 3%, checkpoint 1%, credit <1%"


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({}, SPLIT),
        ({"tokens": 123_456}, f"{SPLIT}; 12,346 tokens/s"),
        ({"tokens": 123_456, "tokens_per_second_per_gpu": 6172.8, "mfu": 0.3125}, f"{SPLIT}; 6,173 tokens/s on each GPU, MFU 31%"),
    ],
)
def test_where_the_time_of_the_last_step_went(tmp_path: Path, capsys: pytest.CaptureFixture[str], metrics: dict[str, Any], line: str) -> None:
    held_out = EvalDone(time=1.0, attempt=1, step=2, sets=SETS, seconds=1.0)
    run = run_of(tmp_path, step(1, reward_mean=0.25), step(2, reward_mean=0.5, seconds=SECONDS, **metrics), held_out)
    shown = status(capsys, str(run)).split("\n")
    assert shown[2:] == ["reward 0.500 (step 2)", line, "eval held_out mean@1 0.500 [0.400,0.600] (step 2)", ""]


def test_a_step_without_seconds_has_no_line_about_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "took" not in status(capsys, str(run_of(tmp_path, step(1, reward_mean=0.25, tokens=3), step(2, seconds={"total": math.nan}, tokens=3))))


def test_a_run_is_found_by_its_name_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    for given, hint in (("run", "did you mean runs/run?"), ("other", "without a directory it is the newest run under ./runs")):
        with pytest.raises(SystemExit):
            main(["status", given])
        assert f"hint: {hint}\n" in capsys.readouterr().err
    assert "done, step 2" in status(capsys)
