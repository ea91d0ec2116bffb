"""How the command's side of an attempt ends: nothing that the ranks' session holds stays, and a run that was taken away is said."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from rftcli.errors import RftError
from rftcli.runtime.launch import StopRequests, end, outcome
from rftcli.runtime.rundir import COMMITTED, RunDir, commit_text
from rftcli.runtime.verdict import RankWatch
from rftcli.runtime.ways import OneMachine


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("first_gone", [True, False])
def test_what_a_reward_has_started_goes_with_the_launcher(tmp_path: Path, first_gone: bool) -> None:
    """Also when the launcher itself has ended before: its group is still there."""
    script = f"sleep 600 & echo $! > {tmp_path}/pid; {'exit 0' if first_gone else 'sleep 600'}"
    launcher = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
    deadline = time.monotonic() + 10
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if first_gone:
        launcher.wait(10)
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
