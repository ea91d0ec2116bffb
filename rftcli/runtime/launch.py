"""Start the ranks through DeepSpeed's launcher, watch them, and say how it ended. Runs in the command's process; imports no torch.

The launcher runs in a session of its own and dies with this process. The outcome is what state.json says; where it still says `running`, the
first rank that failed or vanished is named with its cause. Leaves out what the ranks do.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rftcli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_RESUME, EXIT_STOPPED
from rftcli.events import RunEnded, to_line
from rftcli.observe.follow import Audience, follow
from rftcli.plan.plan import Plan
from rftcli.protocols import Observer
from rftcli.runtime import disk
from rftcli.runtime.rundir import AttemptDir, RunDir, State
from rftcli.runtime.verdict import RankWatch, first_cause, first_exit_code

END_GRACE_SECONDS = 45.0
"""Time for ranks to leave after the run has ended, before they are killed: trackers flush in it."""
KILL_GRACE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    exit_code: int
    state: State


def launch(run: RunDir, attempt: AttemptDir, plan: Plan, *, job: Mapping[str, Any], observers: Sequence[Observer]) -> Outcome:
    """Run one attempt to its end. `job` is what the ranks read beside the plan (mode, checkpoint); written to launch.json."""
    command = launcher_command(attempt, plan)
    attempt.launch.write_text(json.dumps({"command": command, "job": dict(job)}, indent=2) + "\n", encoding="utf-8")
    before = run.read_state()
    run.write_state(State(status="running", step=int(job.get("step", 0)), attempt=attempt.number, heartbeat=time.time()))
    stops = StopRequests(attempt)
    with (attempt.logs / "launcher.log").open("ab") as log, stops.listening():
        launcher = subprocess.Popen(
            command,
            env=rank_environment(plan, attempt),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        watch = RankWatch(attempt, plan.world.ranks)

        def over() -> bool:
            watch.look()
            if stops.now:
                _end(launcher, watch, KILL_GRACE_SECONDS)
            return launcher.poll() is not None

        audience = Audience(observers)
        try:
            follow(run.path, [audience], attempt.number, from_start=True, stop=over)
            _wait(launcher, over, END_GRACE_SECONDS)
        finally:
            _end(launcher, watch, KILL_GRACE_SECONDS)
            audience.close()
    return outcome(run, attempt, watch, stops, before)


def launcher_command(attempt: AttemptDir, plan: Plan) -> list[str]:
    """DeepSpeed's per-node launcher for one machine. Ranks meet through a file, so its port is never listened on."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(plan.world.ranks))}).encode()).decode()
    return [
        *(sys.executable, "-m", "deepspeed.launcher.launch"),
        *(f"--world_info={world}", "--node_rank=0", "--master_addr=127.0.0.1", "--master_port=29500", "--no_local_rank"),
        *("--module", "rftcli.runtime.rank", str(attempt.run.path), str(attempt.number)),
    ]


def rank_environment(plan: Plan, attempt: AttemptDir) -> dict[str, str]:
    """This process's environment plus what every rank needs to be the same on any machine."""
    package_root = str(Path(__file__).resolve().parents[2])
    threads = str(plan.world.threads_per_rank)
    paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        "DS_ACCELERATOR": plan.world.device,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({"MKL_CBWR": "AUTO,STRICT"} if plan.world.device == "cpu" else {}),  # matrix products with the same bits for any thread count
    }


class StopRequests:
    """Ctrl-C and SIGTERM: the first asks the ranks to stop after this step, a second one ends them at once."""

    def __init__(self, attempt: AttemptDir) -> None:
        self.now: str | None = None
        """The signal that asked for an end at once."""
        self._attempt = attempt
        self._asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(number, self._heard)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: object) -> None:
        word = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._asked and number != signal.SIGHUP:  # a terminal that closes may say so twice
            self.now = word
            return
        self._asked = True
        try:
            self._attempt.request_stop("interrupt" if number == signal.SIGINT else "terminate")
        except OSError:  # a full disk: the ranks will not hear of it
            self.now = word
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"\nstopping after this step with a checkpoint; {word} again ends it now\n".encode())


def outcome(run: RunDir, attempt: AttemptDir, watch: RankWatch, stops: StopRequests, before: State | None) -> Outcome:
    """The exit code from the run's own state; a state that still says running is settled here.

    A resume that the ranks refused leaves the state as it was `before`.
    """
    state = run.read_state()
    assert state is not None
    if state.status == "running":
        cause = f"ended at once on a second {stops.now}" if stops.now else first_cause(attempt, watch)
        state = replace(state, status="stopped" if stops.now else "failed", cause=cause)
        refused = not stops.now and first_exit_code(attempt) == EXIT_RESUME
        try:
            run.write_state(before if refused and before is not None else state)
            close_book(run, state)
        except OSError as error:  # a full disk may be why the run ended: its cause is still told
            if not disk.is_full(error):
                raise
        if refused:
            return Outcome(exit_code=EXIT_RESUME, state=state)
    if state.status == "done":
        code = EXIT_OK
    elif stops.now == "Ctrl-C" or (state.status == "stopped" and not stops.now and attempt.stop_reason() == "interrupt"):
        code = EXIT_INTERRUPTED
    elif state.status == "stopped" and (not stops.now or run.committed_checkpoints()):
        code = EXIT_STOPPED  # a scheduler may start it again
    else:
        code = EXIT_FAILED
    return Outcome(exit_code=code, state=state)


def close_book(run: RunDir, state: State) -> None:
    """The end event of an attempt whose rank 0 could not write it any more."""
    with run.events.open("a", encoding="utf-8") as file:
        event = RunEnded(time=time.time(), attempt=state.attempt, step=state.step, status=state.status, cause=state.cause)
        file.write("\n" + to_line(event) + "\n")  # the first newline ends a line that was torn


def _wait(launcher: subprocess.Popen[bytes], over: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:
        time.sleep(0.1)


def _end(launcher: subprocess.Popen[bytes], watch: RankWatch, grace_seconds: float) -> None:
    """Leave no process: ask the launcher (which asks the ranks), then kill the session."""
    if launcher.poll() is None:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(grace_seconds)
    for pid in [launcher.pid, *watch.living()]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(os.getpgid(pid), signal.SIGKILL) if pid == launcher.pid else os.kill(pid, signal.SIGKILL)
    launcher.wait()


def _die_with_parent() -> None:
    """In the launcher, before it starts: SIGTERM when the command is gone, so that a closed terminal leaves nothing behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
