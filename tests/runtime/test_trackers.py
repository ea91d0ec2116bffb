"""What the side process of the trackers is told."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from rftcli.events import RunEnded, RunStarted, to_line
from rftcli.plan.plan import TrackPlan
from rftcli.runtime.rundir import RunDir
from rftcli.runtime.trackers import Trackers

SECRET = "sesame-open-5533"


def test_a_secret_of_the_environment_reaches_no_file_of_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`${TEAM_KEY}` in `track.wandb` is what a rank runs with; wandb writes what it is told into its own files."""
    for name, value in {"TEAM_KEY": SECRET, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    run = RunDir(tmp_path / "run")
    run.create()
    attempt = run.attempt(1)
    attempt.create()
    told = {"project": "p", "group": f"team {SECRET}", "name": SECRET, "tags": ["plain", SECRET], "mode": "offline"}
    trackers = Trackers(attempt, TrackPlan(tensorboard=None, wandb=told))
    run.events.write_text(to_line(RunStarted(time=0.0, attempt=1, step=0, info={})) + "\n")
    before = {one.pid for one in psutil.Process().children()}
    trackers.start()
    try:
        (child,) = (one for one in psutil.Process().children() if one.pid not in before)
        deadline = time.monotonic() + 60
        while "rftcli.observe.tracker" not in (line := " ".join(child.cmdline())) and time.monotonic() < deadline:
            time.sleep(0.01)  # it has only just been forked
        assert "team ***" in line and SECRET not in line
        with run.events.open("a") as file:
            file.write(to_line(RunEnded(time=1.0, attempt=1, step=0, status="done")) + "\n")
        child.wait(120)
    finally:
        trackers.close()
    deadline = time.monotonic() + 60
    while not (written := list((run.path / "wandb").rglob("*.wandb"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert written and any(b"plain" in path.read_bytes() for path in written)
    assert not [path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
