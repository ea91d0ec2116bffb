"""Ranks of other machines: what their warden tells, what the command makes of it, and who ends whom."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.verdict import first_cause, process_start
from rftcli.runtime.warden import FarWatch, Pulse, Warden, over_file, write_small


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(1).create()
    return run.attempt(1)


@pytest.fixture
def rank(attempt: AttemptDir) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A process that stands for a rank of some node."""
    started = []

    def start(number: int, node: str = "a") -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        record = {"pid": process.pid, "started": process_start(process.pid), "time": 0.0, "host": f"host-{node}", "node": node}
        (attempt.ranks / f"rank_{number}.json").write_text(json.dumps(record))
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_rank_that_dies_far_away(attempt: AttemptDir, rank: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Its warden sees the process, the command only the warden's file; the rank is named with its machine and signal."""
    here, there = rank(0, "a"), rank(1, "b")
    first, second, watch = Warden(attempt, "a"), Warden(attempt, "b"), FarWatch(attempt, 2, 2)
    until(lambda: (first.look(), second.look(), watch.look(), watch.started)[-1])
    assert watch.vanished == [] and not watch.broken and watch.living() == []
    there.kill()
    until(lambda: (second.look(), watch.look(), watch.vanished)[-1])
    assert watch.vanished == [1] and first.watch.only == [0] and second.watch.only == [1]
    assert first_cause(attempt, watch).startswith(f"rank 1 (pid {there.pid} on ") and "SIGKILL" in first_cause(attempt, watch)
    assert here.poll() is None


def test_the_end_is_told_to_all(attempt: AttemptDir, rank: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = rank(0)
    warden, watch = Warden(attempt, "a", leave_seconds=1.0), FarWatch(attempt, 1, 1)
    warden.look()
    assert not warden.over
    watch.end()
    warden.look()
    assert warden.over and process.poll() is None  # it has time to leave by itself
    until(lambda: (warden.look(), process.poll())[-1] is not None)
    watch.tell(75)
    assert json.loads(over_file(attempt).read_text()) == {"exit_code": 75}


def test_a_machine_that_falls_silent(attempt: AttemptDir) -> None:
    watch = FarWatch(attempt, 2, 1)
    write_small(attempt.ranks / "warden_b.json", {"host": "host-b", "beat": 7, "ranks": [0, 1], "gone": {}})
    (attempt.ranks / "rank_0.done").write_text("")
    watch.look()
    assert watch.vanished == []
    time.sleep(0.6)
    watch.look(silent_seconds=0.5)
    assert watch.vanished == [1] and "nothing was heard of host-b" in first_cause(attempt, watch)  # rank 0 had finished


def test_a_command_that_falls_silent(attempt: AttemptDir) -> None:
    """Its ranks do not outlive it: nobody would hear of them any more."""
    warden, watch = Warden(attempt, "a", silent_seconds=2.0), FarWatch(attempt, 1, 1)
    watch.look()
    warden.look()
    assert not warden.over
    until(lambda: (warden.look(), warden.over)[-1])


def test_nodes_that_never_start(attempt: AttemptDir) -> None:
    watch = FarWatch(attempt, 2, 2, start_seconds=0.0, let_speak_seconds=0.0)
    write_small(attempt.ranks / "warden_a.json", {"host": "host-a", "beat": 1, "ranks": [0], "gone": {}})
    until(lambda: (watch.look(), watch.broken)[-1])
    assert "only 1 of 2 nodes started" in first_cause(attempt, watch)


def test_age_is_measured_by_the_reader() -> None:
    pulse = Pulse()
    assert pulse.seen(1) < 0.1
    time.sleep(0.2)
    assert pulse.seen(1) >= 0.2 and pulse.seen(2) < 0.1
