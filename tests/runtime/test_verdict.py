"""Who failed first: the rank with its own error, not the one that noticed; a killed rank is named although it could not speak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rftcli.errors import RftError
from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.verdict import RankWatch, first_cause, is_secondary, process_start, record_failure


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    run = RunDir(tmp_path / "run")
    run.create()
    found = run.attempt(1)
    found.create()
    return found


def stand_in(attempt: AttemptDir, rank: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    record = {"pid": process.pid, "started": process_start(process.pid), "time": time.time()}
    (attempt.ranks / f"rank_{rank}.json").write_text(json.dumps(record))
    return process


def test_the_first_own_error_wins_over_peers_that_noticed(attempt: AttemptDir) -> None:
    record_failure(attempt, 0, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), "tb")
    time.sleep(0.01)
    record_failure(attempt, 1, ValueError("the reward broke"), "tb")
    cause = first_cause(attempt, RankWatch(attempt, 2))
    assert cause.startswith("rank 1: ValueError: the reward broke") and "rank_1.log" in cause


def test_our_own_errors_come_with_their_hint_and_no_type(attempt: AttemptDir) -> None:
    record_failure(attempt, 1, RftError("too many errors", hint="look at the samples"), "tb")
    assert first_cause(attempt, RankWatch(attempt, 2)) == "rank 1: too many errors\nhint: look at the samples"


def test_a_killed_rank_is_named(attempt: AttemptDir) -> None:
    processes = [stand_in(attempt, rank) for rank in range(2)]
    watch = RankWatch(attempt, 2)
    watch.look()
    assert watch.vanished == [] and len(watch.living()) == 2
    processes[1].kill()
    deadline = time.monotonic() + 20
    while not watch.vanished and time.monotonic() < deadline:
        watch.look()
    processes[1].wait()
    attempt.log(1).write_text("step 3\nlearning\n")
    record_failure(attempt, 0, RuntimeError("Connection closed by peer"), "tb")
    cause = first_cause(attempt, watch)
    processes[0].kill()
    processes[0].wait()
    assert f"rank 1 (pid {processes[1].pid}) died without a word, killed by SIGKILL" in cause
    assert "learning" in cause


def test_a_rank_that_is_done_has_not_vanished(attempt: AttemptDir) -> None:
    process = stand_in(attempt, 0)
    watch = RankWatch(attempt, 1)
    watch.look()
    (attempt.ranks / "rank_0.done").write_text("")
    process.kill()
    process.wait()
    watch.look()
    assert watch.vanished == []


def test_a_zombie_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 20
    while process_start(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process_start(process.pid) == ""
    process.wait()
    assert process_start(os.getpid()) != ""


def test_without_any_word_the_launcher_log_speaks(attempt: AttemptDir) -> None:
    (attempt.logs / "launcher.log").write_text("No module named deepspeed\n")
    assert "No module named deepspeed" in first_cause(attempt, RankWatch(attempt, 2))


@pytest.mark.parametrize(
    ("kind", "text", "secondary"),
    [
        ("RuntimeError", "Connection reset by peer", True),
        ("DistBackendError", "NCCL error in: ...", True),
        ("ValueError", "Connection closed by peer", False),
        ("RuntimeError", "shape mismatch", False),
    ],
)
def test_secondary(kind: str, text: str, secondary: bool) -> None:
    assert is_secondary(kind, text) is secondary
