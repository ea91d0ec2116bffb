"""Start the ranks, watch them, and say how it ended. Runs in the command's process; imports no torch.

The launcher runs in a session of its own and dies with this process. The outcome is what state.json says; where it still says `running`, the
first rank that failed or vanished is named with its cause. Leaves out what the ranks do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rftcli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_RESUME, EXIT_STOPPED, RftError
from rftcli.events import RunEnded, gap, to_line
from rftcli.observe.follow import Audience, follow
from rftcli.plan.plan import Plan, plan_from_json
from rftcli.protocols import Observer
from rftcli.redact import known_values, redacted_arguments
from rftcli.runtime import disk
from rftcli.runtime.environment import live_plan
from rftcli.runtime.rundir import AttemptDir, RunDir, State, write_json
from rftcli.runtime.starter import END_NOW
from rftcli.runtime.verdict import Watch, first_cause, first_exit_code, held_up
from rftcli.runtime.warden import LEAVE_SECONDS, SILENT_SECONDS, Pulse, command_file, over_file, read_small
from rftcli.runtime.ways import OneMachine, OneOfCrew, Way

END_GRACE_SECONDS = 45.0
"""Time for ranks to leave after the run has ended, before they are killed: trackers flush in it."""
KILL_GRACE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
LAUNCHER_GONE = "the launcher that had started this job was ended from outside, and its ranks with it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    exit_code: int
    state: State


def launch(
    run: RunDir, attempt: AttemptDir, plan: Plan, *, job: Mapping[str, Any], observers: Sequence[Observer], way: Way | None = None
) -> Outcome:
    """Run one attempt to its end. `job` is what the ranks read beside the plan (mode, checkpoint); written to launch.json. `way`: how the ranks are
    started; None: on this machine."""
    way = OneMachine(plan.world.ranks) if way is None else way
    command = way.command(attempt)
    told = {"command": redacted_arguments(command, known_values(os.environ)), "job": dict(job), **way.meeting()}
    before = run.read_state()
    run.write_state(State(status="running", step=int(job.get("step", 0)), attempt=attempt.number, heartbeat=time.time()))
    write_json(attempt.launch, told)
    if isinstance(way, OneOfCrew):
        way.crew.announce(attempt)
    stops = StopRequests(attempt)
    with stops.listening():
        launcher = start(command, way, plan, attempt.logs / "launcher.log")
        watch = way.watch(attempt, plan)

        def over() -> bool:
            way.beat()
            watch.look()
            if stops.now or watch.broken or way.abandoned:
                end(launcher, way, watch, KILL_GRACE_SECONDS)
            return launcher.poll() is not None or watch.finished

        audience = Audience(observers)
        try:
            follow(run.path, [audience], attempt.number, from_start=True, stop=over)
            _wait(launcher, over, END_GRACE_SECONDS)
        finally:
            end(launcher, way, watch, KILL_GRACE_SECONDS)
            audience.close()
        result = outcome(run, attempt, watch, stops, before, way)
        watch.tell(result.exit_code)
    return result


def start(command: Sequence[str], way: Way, plan: Plan, log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C reaches this process alone; it goes when this process goes."""

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, way.death_signal)

    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            env=way.environment(live_plan(plan, os.environ)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def serve(attempt: AttemptDir, way: OneOfCrew) -> int:
    """In a process of a job that somebody else has started, but for rank 0: this rank from its start to its end; the exit code of the whole job."""
    plan = plan_from_json(attempt.plan.read_text(encoding="utf-8"))
    stops = StopRequests(attempt, speaks=False)
    told = Pulse()
    with stops.listening():
        launcher = start(way.command(attempt), way, plan, attempt.logs / f"launcher_{way.crew.place.rank}.log")
        try:
            while True:
                way.beat()
                last = read_small(over_file(attempt))
                if last is not None and "exit_code" in last:
                    _wait(launcher, lambda: launcher.poll() is not None, KILL_GRACE_SECONDS)
                    return int(last["exit_code"])
                command = read_small(command_file(attempt))
                silent = told.seen((None if command is None else command["beat"], last))
                if stops.now or way.abandoned or silent > SILENT_SECONDS + END_GRACE_SECONDS:
                    return EXIT_INTERRUPTED if stops.now else EXIT_FAILED
                time.sleep(0.2)
        finally:
            end(launcher, way, None, KILL_GRACE_SECONDS)


class StopRequests:
    """Ctrl-C and SIGTERM: the first asks the ranks to stop after this step, a second one ends them at once."""

    def __init__(self, attempt: AttemptDir, *, speaks: bool = True) -> None:
        self.now: str | None = None
        """The signal that asked for an end at once."""
        self._speaks = speaks
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
        if self._speaks:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"\nstopping after this step with a checkpoint; {word} again ends it now\n".encode())


def outcome(run: RunDir, attempt: AttemptDir, watch: Watch, stops: StopRequests, before: State | None, way: Way) -> Outcome:
    """The exit code from the run's own state; a state that still says running is settled here.

    A resume that the ranks refused leaves the state as it was `before`.
    """
    state = run.read_state()
    if state is None:
        hint = f"`rft resume {run.quoted}` goes on from its newest checkpoint" if run.committed_checkpoints() else None
        raise RftError(f"{run.state_file} was removed while the run was going", hint=hint)
    if state.status == "running":
        if not stops.now and not way.abandoned and first_exit_code(attempt) is None:
            watch.settle()
        cause = f"ended at once on a second {stops.now}" if stops.now else LAUNCHER_GONE if way.abandoned else first_cause(attempt, watch)
        state = replace(state, status="stopped" if stops.now or held_up(attempt) else "failed", cause=cause)
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
    elif state.status == "stopped" and (not (stops.now or held_up(attempt)) or run.committed_checkpoints()):
        code = EXIT_STOPPED  # a scheduler may start it again
    else:
        code = EXIT_FAILED
    return Outcome(exit_code=code, state=state)


def close_book(run: RunDir, state: State) -> None:
    """The end event of an attempt whose rank 0 could not write it any more."""
    event = RunEnded(time=time.time(), attempt=state.attempt, step=state.step, status=state.status, cause=state.cause)
    first = gap(run.events)
    with run.events.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(first + to_line(event) + "\n")


def _wait(launcher: subprocess.Popen[bytes], over: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:
        time.sleep(0.1)


def end(launcher: subprocess.Popen[bytes], way: Way, watch: Watch | None, grace_seconds: float) -> None:
    """Leave no process: ask the launcher (which asks the ranks), then kill the session. Ranks of other machines are ended by their wardens."""
    if watch is not None:
        watch.end()
    if launcher.poll() is None:
        if way.gentle:
            launcher.send_signal(END_NOW)
        _wait(launcher, lambda: launcher.poll() is not None, grace_seconds if way.gentle else LEAVE_SECONDS + grace_seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher.pid, signal.SIGKILL)  # the group outlives the launcher where a reward has left a process behind
    for pid in watch.living() if watch is not None else ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()
