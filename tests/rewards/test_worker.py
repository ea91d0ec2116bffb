"""Helper processes: time limits, crashes, restarts, threads, and that they do not outlive their caller."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rftcli.rewards.worker import WorkerCrashed, WorkerError, WorkerPool, WorkerTimeout

HELPER = """
import os, re, sys, time
from rftcli.rewards.worker import serve

def main():
    serve(lambda: answer)

def answer(request):
    match request:
        case ["echo", value]: return value
        case ["pid"]: return os.getpid()
        case ["sleep", seconds]: time.sleep(seconds); return "woke"
        case ["hold"]: re.match(r"(a+)+$", "a" * 60 + "b")  # one C call that keeps the interpreter for years
        case ["die", code]: print("last words", file=sys.stderr, flush=True); os._exit(code)
        case ["print"]: print("noise"); os.write(1, b"more noise\\n"); return "quiet"
        case ["eat"]: return len("x" * (1 << 36))
        case ["object"]: return object()
    raise KeyError("what?")
"""
BROKEN = "from rftcli.rewards.worker import serve\ndef main(): serve(prepare)\ndef prepare(): raise ImportError('no such library')\n"


@pytest.fixture(scope="module")
def helpers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("helpers")
    (folder / "helper_for_tests.py").write_text(HELPER)
    (folder / "broken_helper_for_tests.py").write_text(BROKEN)
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def pool(helpers: Path) -> Iterator[WorkerPool]:
    pool = WorkerPool("helper_for_tests", size=2)
    yield pool
    pool.close()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not gone(pid):
        time.sleep(0.02)
    return gone(pid)


def test_it_starts_when_needed_and_is_used_again(pool: WorkerPool) -> None:
    assert pool.pids() == []
    first, second = pool.call(["pid"], 5), pool.call(["pid"], 5)
    assert first == second and pool.pids() == [first] and first != os.getpid()
    assert pool.call(["echo", {"text": "\u2212\n\u2028 {" + "x" * 200_000}], 5) == {"text": "\u2212\n\u2028 {" + "x" * 200_000}


def test_one_started_ahead_is_the_one_that_is_called(pool: WorkerPool) -> None:
    pool.warm()
    (pid,) = pool.pids()
    pool.warm()
    assert pool.pids() == [pid]
    assert [pool.call(["pid"], 5) for _ in range(2)] == [pid, pid]
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid, 30)
    pool.warm()
    assert pool.call(["pid"], 5) != pid


def test_one_started_ahead_that_cannot_run_is_told_by_the_call(helpers: Path) -> None:
    pool = WorkerPool("broken_helper_for_tests")
    pool.warm()
    with pytest.raises(WorkerCrashed, match="`broken_helper_for_tests` cannot run: ImportError: no such library"):
        pool.call(["echo", 1], 5)
    pool.close()
    pool.warm()
    assert pool.pids() == []


def test_a_time_limit_kills_and_the_next_call_works(pool: WorkerPool) -> None:
    pid = pool.call(["pid"], 5)
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"no verdict within 0\.2 seconds"):
        pool.call(["hold"], 0.2)
    assert time.monotonic() - start < 20
    assert gone(pid) and pool.pids() == []
    assert pool.call(["echo", 1], 5) == 1


def test_a_crash_is_told_and_the_next_call_works(pool: WorkerPool) -> None:
    with pytest.raises(WorkerCrashed, match=r"`helper_for_tests` ended \(exit code 7\): last words"):
        pool.call(["die", 7], 5)
    assert pool.call(["echo", 1], 5) == 1


def test_a_helper_killed_from_outside_while_idle_is_replaced(pool: WorkerPool) -> None:
    pid = pool.call(["pid"], 5)
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid, 30)
    assert pool.call(["pid"], 5) != pid


def test_errors_of_the_helper_leave_it_alive(pool: WorkerPool) -> None:
    pid = pool.call(["pid"], 5)
    with pytest.raises(WorkerError, match=r"KeyError: 'what\?'"):
        pool.call(["unknown"], 5)
    with pytest.raises(WorkerError, match="TypeError: Object of type object is not JSON serializable"):
        pool.call(["object"], 5)
    with pytest.raises(WorkerError, match="MemoryError"):
        pool.call(["eat"], 5)
    with pytest.raises(TypeError):  # a request that is not JSON never gets there
        pool.call([object()], 5)
    assert pool.call(["print"], 5) == "quiet"
    assert pool.call(["pid"], 5) == pid


def test_a_helper_that_cannot_start_says_why_each_time(helpers: Path) -> None:
    pool = WorkerPool("broken_helper_for_tests")
    for _ in range(2):
        with pytest.raises(WorkerCrashed, match="`broken_helper_for_tests` cannot run: ImportError: no such library"):
            pool.call(["echo", 1], 5)
    pool.close()
    missing = WorkerPool("no_such_helper_for_tests")
    with pytest.raises(WorkerCrashed, match="No module named 'no_such_helper_for_tests'"):
        missing.call(1, 5)
    missing.close()


def test_many_threads_share_two_helpers(pool: WorkerPool) -> None:
    def ask(number: int) -> object:
        if number % 10 == 3:
            with pytest.raises(WorkerCrashed):
                pool.call(["die", 1], 5)
            return number
        return pool.call(["echo", number], 5)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(60))) == list(range(60))
    assert 1 <= len(pool.pids()) <= 2


def test_a_helper_outlives_the_thread_that_started_it(pool: WorkerPool) -> None:
    pids: list[int] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: pids.append(pool.call(["pid"], 5)))
        thread.start()
        thread.join()
    assert pids[0] == pids[1]


def test_close_ends_a_call_that_is_under_way(helpers: Path) -> None:
    pool = WorkerPool("helper_for_tests")
    pid = pool.call(["pid"], 5)
    caught: list[BaseException] = []

    def sleep() -> None:
        try:
            pool.call(["sleep", 300], 300)
        except WorkerCrashed as error:
            caught.append(error)

    thread = threading.Thread(target=sleep)
    thread.start()
    time.sleep(0.1)
    pool.close()
    thread.join(30)
    assert len(caught) == 1 and gone(pid)
    with pytest.raises(WorkerCrashed, match="was closed"):
        pool.call(["echo", 1], 5)
    pool.close()


@pytest.mark.parametrize("busy", [False, True])
def test_it_dies_with_a_caller_that_is_killed(helpers: Path, busy: bool) -> None:
    code = textwrap.dedent(f"""
        import sys
        sys.path.append({str(helpers)!r})
        from rftcli.rewards.worker import WorkerPool
        pool = WorkerPool("helper_for_tests")
        print(pool.call(["pid"], 5), flush=True)
        pool.call(["hold"], 3.0) if {busy} else sys.stdin.read()
    """)
    caller = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None and caller.stdin is not None
    pid = int(caller.stdout.readline())
    time.sleep(0.2)
    assert not gone(pid)
    caller.kill()
    caller.wait()
    caller.stdin.close()
    caller.stdout.close()
    assert wait_until_gone(pid, 30)  # a busy one: its limit and the grace
