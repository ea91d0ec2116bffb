"""Starts the ranks of an attempt on this machine, and ends with them: `python -m rftcli.runtime.starter RANKS RUN_DIR ATTEMPT`.

It tells ranks what DeepSpeed's launcher for one node tells them, and ends them as that does, but imports no torch, which would take longer than all
else before the first step. The first rank that fails ends the others, and so do END_NOW and SIGINT: with whatever they have started, asked first
and killed after a grace. SIGTERM, which a service manager or a scheduler sends to every process of a job, asks for a stop with a checkpoint. What it
sees goes to launcher.log with the time: when ranks were started, and how each ended. Leaves out several machines, which DeepSpeed's own launchers
start (`hosts`), and the reasons of an end (`verdict`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NoReturn

import psutil

from rftcli.errors import EXIT_FAILED, EXIT_OK
from rftcli.observe.text import duration
from rftcli.runtime.engine_process import own_devices
from rftcli.runtime.hosts import RANK_MODULE, UNUSED_PORT
from rftcli.runtime.rundir import RunDir
from rftcli.runtime.travel import Place

END_NOW = signal.SIGUSR2
"""Ends the starter at once, and a rank, which does nothing about it: SIGTERM means something else to them."""
LOOK_SECONDS = 0.1
LET_SPEAK_SECONDS = 1.0
"""Between the first rank that has failed and the end of all: the others write down what they noticed, and whoever watches sees who was first."""
LEAVE_SECONDS = 30.0


class Asked(Exception):
    """Somebody wants this to end."""


def environment(environ: Mapping[str, str], rank: int, ranks: int) -> dict[str, str]:
    """What a rank is told. GPUs: the first `ranks` of those that may be used, one each."""
    found = {
        **environ,
        **Place(rank=rank, size=ranks, local_rank=rank, local_size=ranks).environment(),
        "LOCAL_SIZE": str(ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(UNUSED_PORT),
    }
    if environ.get("DS_ACCELERATOR") == "cuda":
        found["CUDA_VISIBLE_DEVICES"] = ",".join(own_devices(environ, 0, ranks))
    return found


def watch(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all are gone, or the first has failed; the exit code."""
    while True:
        failed = _say_who_failed(processes, set())
        if failed:
            time.sleep(LET_SPEAK_SECONDS)
            _say_who_failed(processes, failed)
            return EXIT_FAILED
        if all(process.returncode == 0 for process in processes):
            return EXIT_OK
        time.sleep(LOOK_SECONDS)


def _say_who_failed(processes: Sequence[subprocess.Popen[bytes]], told: Set[int]) -> set[int]:
    """The ranks that have failed, all of them: one that only noticed another's end may be seen before that other. `told`: said before."""
    failed = {rank for rank, process in enumerate(processes) if process.poll()}
    for rank in sorted(failed - told):
        code = processes[rank].returncode
        how = f"killed by {_signal_name(-code)}" if code < 0 else "an error"
        say(f"{_named(processes, rank)} exits with return code = {code} ({how}: see rank_{rank}.log)")
    return failed


def _named(processes: Sequence[subprocess.Popen[bytes]], *ranks: int) -> str:
    return ", ".join(f"rank {rank} (pid {processes[rank].pid})" for rank in ranks)


def _signal_name(number: int) -> str:
    """Also of a real-time signal, which has no name."""
    return signal.Signals(number).name if number in iter(signal.Signals) else f"signal {number}"


def end(processes: Sequence[subprocess.Popen[bytes]], grace_seconds: float = LEAVE_SECONDS) -> None:
    """No process of a rank stays, nor any that it has started."""
    left: list[psutil.Process] = []
    for process in processes:
        try:
            root = psutil.Process(process.pid)
            started = root.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        for one in started:
            _send(one, signal.SIGTERM)
        _send(root, END_NOW)
        left += [*started, root]
    _, alive = psutil.wait_procs(left, timeout=grace_seconds)
    for one in alive:
        _send(one, signal.SIGKILL)
    if alive:
        say(f"killed, because they had not gone after {duration(grace_seconds)}: {', '.join(f'pid {one.pid}' for one in alive)}")


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def hear(handler: Any) -> None:
    """What SIGINT and END_NOW do from here on."""
    for number in (signal.SIGINT, END_NOW):
        signal.signal(number, handler)


def say(text: str) -> None:
    """Goes to the launcher's log, which `verdict` reads."""
    with contextlib.suppress(OSError):  # a full disk
        os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())


def run(command: Sequence[str], ranks: int, stop: Callable[[], None]) -> int:
    """`command` once for each rank, from start to end; the exit code. `stop` asks the ranks for a checkpoint and an end."""
    began = time.monotonic()

    def asked(number: int, _: object) -> NoReturn:
        hear(signal.SIG_IGN)
        raise Asked(signal.Signals(number).name)

    def asked_to_stop(number: int, _: object) -> None:
        say("SIGTERM: the ranks are asked to stop after their step, with a checkpoint")
        stop()

    def ended_well() -> bool:
        """Have all ended, and none with an error? Says so."""
        well = len(processes) == ranks and all(process.poll() == 0 for process in processes)
        if well:
            say(f"{f'all {ranks} ranks' if ranks > 1 else 'the rank'} ended with exit code 0 after {duration(time.monotonic() - began)}")
        return well

    processes: list[subprocess.Popen[bytes]] = []
    try:
        hear(asked)
        signal.signal(signal.SIGTERM, asked_to_stop)
        for rank in range(ranks):
            processes.append(subprocess.Popen(command, env=environment(os.environ, rank, ranks)))
        say(f"started {_named(processes, *range(ranks))}")
        code = watch(processes)
        return EXIT_OK if code == EXIT_OK and ended_well() else EXIT_FAILED
    except Asked as word:
        if ended_well():  # the command, which asks, has seen it first
            return EXIT_OK
        sender = " (whoever started this wants it, or is gone)" if str(word) == END_NOW.name else ""
        say(f"asked to end by {word}{sender}: ending the ranks")
        return EXIT_FAILED
    finally:
        hear(signal.SIG_IGN)
        running = [rank for rank, process in enumerate(processes) if process.poll() is None]
        if running:
            say(f"still running, and ended now: {_named(processes, *running)}")
        end(processes)


if __name__ == "__main__":
    _attempt = RunDir(sys.argv[2]).attempt(int(sys.argv[3]))
    raise SystemExit(run([sys.executable, "-u", "-m", RANK_MODULE, *sys.argv[2:]], int(sys.argv[1]), _attempt.ask_to_stop))
