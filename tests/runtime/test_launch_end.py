"""How the command's side of an attempt ends: nothing that the ranks' session holds stays, and a run that was taken away is said."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from rftcli.errors import HeldUpError, RftError
from rftcli.runtime.launch import StopRequests, end, outcome
from rftcli.runtime.rundir import COMMITTED, RunDir, State, commit_text
from rftcli.runtime.verdict import RankWatch, record_failure
from rftcli.runtime.ways import OneMachine


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("first_gone", [True, False])
def test_what_a_reward_has_started_goes_with_the_launcher(tmp_path: Path, first_gone: bool) -> None:
    """Also when the launcher itself has ended before: its group is still there."""
    script = f"sleep 600 & echo $! > {tmp_path}/pid; {'exit 0' if first_gone else 'sleep 600'}"
    launcher = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if first_gone:
        launcher.wait(60)
    left = int((tmp_path / "pid").read_text())
    assert alive(left)
    end(launcher, OneMachine(1), None, 1.0)
    while alive(left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(left) and launcher.poll() is not None


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_directory_that_was_taken_away(tmp_path: Path, saved: bool) -> None:
    run = RunDir(tmp_path / "run")
    attempt = run.attempt(1)
    if saved:
        folder = run.checkpoints / "step_000004"
        folder.mkdir(parents=True)
        (folder / COMMITTED).write_text(commit_text(4, 1))
    with pytest.raises(RftError, match=r"state\.json was removed while the run was going") as caught:
        outcome(run, attempt, RankWatch(attempt, 1), StopRequests(attempt), None, OneMachine(1))
    assert caught.value.hint == (f"`rft resume {run.path}` goes on from its newest checkpoint" if saved else None)


@pytest.mark.parametrize(
    ("error", "reason", "saved", "code", "status"),
    [
        (HeldUpError("part `slow` has not returned", hint="a limit"), "interrupt", False, 130, "stopped"),
        (HeldUpError("part `slow` has not returned", hint="a limit"), "terminate", True, 75, "stopped"),
        (HeldUpError("part `slow` has not returned", hint="a limit"), "terminate", False, 1, "stopped"),
        (RftError("part `slow` failed"), "interrupt", True, 1, "failed"),
    ],
)
def test_a_step_that_a_reward_held_up_ends_as_on_a_second_request(
    tmp_path: Path, error: RftError, reason: str, saved: bool, code: int, status: str
) -> None:
    """A rank left its step; another one noticed that it is gone. An error of another kind is a failure, whatever was asked for."""
    run = RunDir(tmp_path / "run")
    attempt = run.attempt(1)
    for folder in (attempt.failures, attempt.logs):
        folder.mkdir(parents=True)
    run.write_state(State(status="running", step=4, attempt=1))
    if saved:
        folder = run.checkpoints / "step_000004"
        folder.mkdir(parents=True)
        (folder / COMMITTED).write_text(commit_text(4, 1))
    attempt.request_stop(reason)
    record_failure(attempt, 0, RuntimeError("Connection closed by peer"), "")
    record_failure(attempt, 1, error, "")
    result = outcome(run, attempt, RankWatch(attempt, 2), StopRequests(attempt), None, OneMachine(2))
    assert (result.exit_code, result.state.status) == (code, status)
    assert "rank 1: part `slow`" in str(result.state.cause) and run.read_state() == result.state
