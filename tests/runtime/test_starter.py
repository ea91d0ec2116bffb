"""Ranks of one machine: what each is told, who is named when one fails, and that nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import rftcli
from rftcli.runtime.starter import END_NOW, end, environment, watch
from rftcli.runtime.travel import Place, place_of

STUBBORN = "import signal, time; [signal.signal(one, signal.SIG_IGN) for one in (15, signal.SIGUSR2)]; print('here', flush=True); time.sleep(600)"
"""A rank that does not leave when it is asked to."""
FAMILY = "import pathlib, subprocess, sys, time; pathlib.Path(sys.argv[1]).write_text(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
"""A rank that has started something."""


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def without_time(said: str) -> list[str]:
    """Lines of launcher.log, each of which begins with the time."""
    return [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.+)", line)[1] for line in said.splitlines()]  # type: ignore[index]


def gone(ranks: list[subprocess.Popen[bytes]]) -> None:
    until(lambda: not any(alive(rank.pid) for rank in ranks))
    for rank in ranks:
        rank.wait(10)  # what was waited for already is forgotten here


def test_every_rank_is_told_its_place() -> None:
    told = [environment({"HOME": "/root", "RANK": "7", "WORLD_SIZE": "9"}, rank, 2) for rank in range(2)]
    assert [place_of(one) for one in told] == [Place(rank=rank, size=2, local_rank=rank, local_size=2) for rank in range(2)]
    assert all(one["HOME"] == "/root" and one["CROSS_RANK"] == "0" and one["LOCAL_SIZE"] == "2" for one in told)
    assert all("CUDA_VISIBLE_DEVICES" not in one for one in told)


@pytest.mark.parametrize(("before", "after"), [(None, "0,1"), ("", "0,1"), ("3, 5,6", "3,5"), ("GPU-ab,GPU-cd", "GPU-ab,GPU-cd")])
def test_ranks_get_the_first_gpus_that_may_be_used(before: str | None, after: str) -> None:
    environ = {"DS_ACCELERATOR": "cuda"} | ({} if before is None else {"CUDA_VISIBLE_DEVICES": before})
    assert environment(environ, 1, 2)["CUDA_VISIBLE_DEVICES"] == after


def test_all_that_end_well() -> None:
    assert watch([subprocess.Popen(["true"]) for _ in range(3)]) == 0


@pytest.mark.parametrize(("how", "code"), [(["sh", "-c", "exit 3"], 3), (["sh", "-c", "kill -9 $$"], -9)])
def test_the_first_that_fails_is_named(how: list[str], code: int, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(how), subprocess.Popen(["true"])]
    try:
        assert watch(ranks) == 1
        assert ranks[0].poll() is None
    finally:
        end(ranks)
    gone(ranks)
    why = "killed by SIGKILL" if code < 0 else "an error"
    assert without_time(capfd.readouterr().err) == [f"rank 1 (pid {ranks[1].pid}) exits with return code = {code} ({why}: see rank_1.log)"]


def test_all_that_fail_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    """The rank before the one that was killed noticed it, and is gone too when the starter looks."""
    ranks = [subprocess.Popen(["sh", "-c", code]) for code in ("exit 1", "kill -TERM $$", "sleep 0.5; exit 2")]
    ranks[1].wait()
    ranks[0].wait()
    assert watch(ranks) == 1
    ends = enumerate(zip(ranks, (1, -15, 2), ("an error", "killed by SIGTERM", "an error"), strict=True))
    told = [f"rank {rank} (pid {one.pid}) exits with return code = {code} ({why}: see rank_{rank}.log)" for rank, (one, code, why) in ends]
    assert without_time(capfd.readouterr().err) == told


def test_what_ranks_have_started_goes_with_them(tmp_path: Path) -> None:
    child = tmp_path / "pid"
    ranks = [subprocess.Popen([sys.executable, "-c", FAMILY, str(child)]), subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)]
    assert ranks[1].stdout is not None and ranks[1].stdout.readline() == b"here\n"
    until(lambda: child.is_file() and child.read_text())
    end(ranks, 0.5)
    gone(ranks)
    until(lambda: not alive(int(child.read_text())))
    ranks[1].stdout.close()


def started(child: Path) -> subprocess.Popen[str]:
    """A starter with one rank, which has started something."""
    return starter_of(1, sys.executable, "-c", FAMILY, str(child))


def starter_of(ranks: int, *command: str) -> subprocess.Popen[str]:
    stop = "lambda: print('stop', file=sys.stderr, flush=True)"
    code = f"import sys; from rftcli.runtime.starter import run; sys.exit(run({command!r}, {ranks}, {stop}))"
    env = {**os.environ, "PYTHONPATH": str(Path(rftcli.__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)


def test_sigterm_asks_for_a_stop_and_ends_nobody(tmp_path: Path) -> None:
    """A scheduler sends it to every process of a job."""
    child = tmp_path / "pid"
    starter = started(child)
    assert starter.stderr is not None
    until(lambda: child.is_file() and child.read_text())
    starter.send_signal(signal.SIGTERM)
    said = [starter.stderr.readline() for _ in range(3)]
    assert "started rank 0 (pid " in said[0] and said[1].endswith("SIGTERM: the ranks are asked to stop after their step, with a checkpoint\n")
    assert said[2] == "stop\n"
    rank = psutil.Process(starter.pid).children()[0]
    assert alive(rank.pid) and starter.poll() is None
    starter.send_signal(END_NOW)
    assert starter.wait(30) == 1
    until(lambda: not alive(int(child.read_text())) and not alive(rank.pid))
    starter.stderr.close()


@pytest.mark.parametrize("number", [END_NOW, signal.SIGINT])
def test_who_asks_the_starter_asks_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    child = tmp_path / "pid"
    starter = started(child)
    until(lambda: child.is_file() and child.read_text())
    rank = psutil.Process(starter.pid).children()[0]
    starter.send_signal(number)
    _, said = starter.communicate(timeout=30)
    sender = " (whoever started this wants it, or is gone)" if number == END_NOW else ""
    assert (starter.returncode, without_time(said)) == (
        1,
        [
            f"started rank 0 (pid {rank.pid})",
            f"asked to end by {number.name}{sender}: ending the ranks",
            f"still running, and ended now: rank 0 (pid {rank.pid})",
        ],
    )
    until(lambda: not alive(int(child.read_text())) and not alive(rank.pid))


@pytest.mark.parametrize(("ranks", "who"), [(1, "the rank"), (2, "all 2 ranks")])
@pytest.mark.parametrize("asked", [False, True])
def test_an_end_without_a_failure_is_told_as_one(ranks: int, who: str, asked: bool) -> None:
    """Also where the command sees it first, and says that it is over."""
    starter = starter_of(ranks, "sleep", "0.3")
    assert starter.stderr is not None
    first = starter.stderr.readline()
    if asked:
        starter.send_signal(signal.SIGSTOP)
        until(lambda: all(one.status() == psutil.STATUS_ZOMBIE for one in psutil.Process(starter.pid).children()))
        starter.send_signal(END_NOW)
        starter.send_signal(signal.SIGCONT)
    _, rest = starter.communicate(timeout=30)
    said = without_time(first + rest)
    assert starter.returncode == 0 and said[0].count("(pid ") == ranks and said[0].startswith("started rank 0 (pid ")
    assert re.fullmatch(rf"{who} ended with exit code 0 after \d+\.\ds", said[1]) and len(said) == 2


def test_ranks_that_find_no_attempt(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rftcli.runtime.starter", "1", str(tmp_path / "run"), "1"]
    env = {**os.environ, "PYTHONPATH": str(Path(rftcli.__file__).parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "exits with return code = 3" in done.stderr and "must lie on a file system" in done.stderr, done.stderr
