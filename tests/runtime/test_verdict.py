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
from rftcli.runtime.rundir import AttemptDir, RunDir, State
from rftcli.runtime.verdict import RankWatch, attempt_lives, first_cause, is_secondary, process_start, record_failure, this_host, why_dead


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    run = RunDir(tmp_path / "run")
    run.create()
    found = run.attempt(1)
    found.create()
    return found


def stand_in(attempt: AttemptDir, rank: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
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
    assert first_cause(attempt, RankWatch(attempt, 2)) == f"rank 1: too many errors\nhint: look at the samples\nlog: {attempt.log(1)}"


def test_a_killed_rank_is_named(attempt: AttemptDir) -> None:
    processes = [stand_in(attempt, rank) for rank in range(2)]
    watch = RankWatch(attempt, 2)
    watch.look()
    assert watch.vanished == [] and len(watch.living()) == 2
    processes[1].kill()
    deadline = time.monotonic() + 60
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


@pytest.mark.parametrize(
    ("told", "how"),
    [
        ("localhost: ['python'] exits with return code = -9\n127.0.0.1: ['python', 'rank'] exits with return code = 1\n", ", killed by SIGKILL"),
        ("['python', 'rank'] exits with return code = -11\n", ", killed by SIGSEGV"),
        ("['python', 'rank'] exits with return code = 3\n", ", exit code 3"),
        ("a: exits with return code = -9\nb: exits with return code = -11\n", ";"),
        ("nothing of the kind\n", ";"),
    ],
)
def test_the_launcher_that_saw_how_a_rank_ended_is_asked(attempt: AttemptDir, told: str, how: str) -> None:
    """Its parent may take a dead process away before anybody else has looked."""
    process = stand_in(attempt, 1)
    watch = RankWatch(attempt, 2)
    watch.look()
    process.kill()
    process.wait()
    watch.look()
    (attempt.logs / "launcher.log").write_text(told)
    assert watch.statuses == {} and f"died without a word{how}" in first_cause(attempt, watch)


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        (
            "rank 0 (pid 1) exits with return code = 1\nrank 1 (pid {pid}) exits with return code = -15\n",
            "rank 1 (pid {pid}) died without a word, killed by SIGTERM;",
        ),
        ("rank 0 (pid 1) exits with return code = 1\n", "rank 1 (pid {pid}) died without a word;"),
        ("2026-01-01 03:00:00 asked to end by SIGTERM: ending the ranks\n", "the launcher was asked to end by SIGTERM, and the ranks with it;"),
        (
            "rank 1 (pid {pid}) exits with return code = 3 (an error: see rank_1.log)\nasked to end by SIGUSR2 (it): ending the ranks\n",
            "rank 1 (pid {pid}) died without a word, exit code 3;",
        ),
    ],
)
def test_the_starter_says_whose_end_it_saw(attempt: AttemptDir, told: str, cause: str) -> None:
    process = stand_in(attempt, 1)
    watch = RankWatch(attempt, 2)
    watch.look()
    process.kill()
    process.wait()
    watch.look()
    (attempt.logs / "launcher.log").write_text(told.format(pid=process.pid))
    assert first_cause(attempt, watch).startswith(cause.format(pid=process.pid))


def test_finished_when_every_rank_has_said_so_and_gone(attempt: AttemptDir) -> None:
    processes = [stand_in(attempt, rank) for rank in range(2)]
    watch = RankWatch(attempt, 2)
    watch.look()
    for rank, process in enumerate(processes):
        (attempt.ranks / f"rank_{rank}.done").write_text("")
        assert not watch.finished
        process.kill()
        process.wait()
    watch.look()
    assert watch.finished and watch.vanished == []
    assert not RankWatch(attempt, 2).finished  # nothing has been seen yet


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
    deadline = time.monotonic() + 60
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


def beating(run: RunDir, status: str = "running", *, host: str | None = None, pid: int | None = None, age_seconds: float = 0.0) -> str | None:
    """Why the run is dead, with rank 0 on `host`, last heard of so long ago."""
    run.write_state(State(status=status, step=3, attempt=1, heartbeat=time.time()))
    at = run.state_file.stat().st_mtime - age_seconds
    os.utime(run.state_file, (at, at))
    if host is not None:
        started = process_start(os.getpid()) if pid is None else "0"
        record = {"pid": pid or os.getpid(), "started": started, "host": host}
        (run.attempt(1).ranks / "rank_0.json").write_text(json.dumps(record))
    return why_dead(run, State(status=status, step=3, attempt=1, heartbeat=time.time() - age_seconds))


@pytest.fixture
def running(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(1).create()
    return run


def test_on_its_own_host_the_process_says_whether_a_run_lives(running: RunDir) -> None:
    assert beating(running, host=this_host(), age_seconds=1e6) is None  # it lives, however long its disk was full
    assert "4194305 is gone" in str(beating(running, host=this_host(), pid=4194305))  # at once, whatever the heartbeat says


def test_elsewhere_the_heartbeat_does_by_the_clock_of_the_file_system(running: RunDir) -> None:
    assert beating(running, host="another", pid=4194305) is None
    assert "no heartbeat for 7" in str(beating(running, host="another", pid=4194305, age_seconds=70.0))
    before = sorted(path.name for path in running.path.iterdir())
    beating(running, host="another", pid=4194305, age_seconds=70.0)
    assert sorted(path.name for path in running.path.iterdir()) == before


def test_a_run_that_is_only_starting_has_no_process_yet(running: RunDir) -> None:
    assert beating(running) is None and "no heartbeat" in str(beating(running, age_seconds=100.0))


def test_what_has_ended_is_not_dead(running: RunDir) -> None:
    for status in ("done", "stopped", "failed"):
        assert beating(running, status, host=this_host(), pid=4194305, age_seconds=1e6) is None


def test_a_pid_of_another_host_is_no_process_here(running: RunDir) -> None:
    beating(running, host="another")
    assert attempt_lives(running.attempt(1))  # by its heartbeat
    beating(running, host="another", age_seconds=1000.0)
    assert not attempt_lives(running.attempt(1))
    beating(running, host=this_host(), age_seconds=1000.0)
    assert attempt_lives(running.attempt(1))


TOO_LONG = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete")


def said(attempt: AttemptDir, rank: int, *stages: str) -> None:
    attempt.log(rank).write_text("".join(f"2026-01-01 00:00:00,000 rft: {stage}\n" for stage in stages) + "Warning: something else\n")


def test_a_rank_that_hangs_is_named_with_its_stage(attempt: AttemptDir) -> None:
    said(attempt, 0, "step 3: collect", "learn", "sync")
    said(attempt, 1, "step 3: collect", "learn")
    said(attempt, 2, "step 3: collect", "learn", "sync")
    for rank in (0, 2):
        record_failure(attempt, rank, TOO_LONG, "tb")
    cause = first_cause(attempt, RankWatch(attempt, 3))
    waiting = "rank 0 in `sync`, rank 2 in `sync`; what did not come: rank 1, last in `learn` ("
    assert cause.startswith(f"waited longer than launch.timeout_minutes: {waiting}")
    assert "rank_1.log" in cause and "hint: " in cause


def test_ranks_that_wait_for_each_other(attempt: AttemptDir) -> None:
    said(attempt, 0, "learn")
    attempt.log(1).write_text("")
    for rank in (0, 1):
        record_failure(attempt, rank, TOO_LONG, "tb")
    cause = first_cause(attempt, RankWatch(attempt, 2))
    assert "waited for each other" in cause and "rank 0 in `learn`, rank 1 in its start" in cause


def test_an_error_before_the_waiting_counts(attempt: AttemptDir) -> None:
    record_failure(attempt, 1, ValueError("the reward broke"), "tb")
    time.sleep(0.01)
    record_failure(attempt, 0, TOO_LONG, "tb")
    assert first_cause(attempt, RankWatch(attempt, 2)).startswith("rank 1: ValueError")
