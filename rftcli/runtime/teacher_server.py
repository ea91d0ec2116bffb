"""The server that the run starts for its teacher. What is asked of it is in `teacher`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rftcli.errors import RftError
from rftcli.plan.plan import Plan
from rftcli.protocols import World
from rftcli.rewards.scorers.spec import StartSpec
from rftcli.runtime.agreed import agreed
from rftcli.runtime.engine_process import stop_all
from rftcli.runtime.judge_servers import JudgeServers, Starter
from rftcli.runtime.judges import GONE_SECONDS, LOOK_SECONDS
from rftcli.runtime.rundir import AttemptDir


@dataclass(slots=True, kw_only=True)
class Served:
    """The teacher's server as one rank sees it."""

    url: str
    model: str
    own: JudgeServers | None
    """Of the rank that has started it."""

    def gone(self) -> str | None:
        """Why it has ended. The other ranks are told by the end of the first one."""
        end = time.monotonic() + (0.0 if self.own is None else GONE_SECONDS)
        while True:
            words = None if self.own is None else self.own.last_words()
            if words is not None or time.monotonic() >= end:
                return words
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        if self.own is not None:
            stop_all(self.own.processes)


def begin_teacher(plan: Plan, world: World, attempt: AttemptDir, by: Starter) -> Served | None:
    """The server that the run starts for its teacher, on its way; `await_teacher` waits for it. Collective where there is one."""
    start = None if plan.teacher is None else plan.teacher.start
    if start is None:
        return None
    own = agreed(world, lambda: _started(start, attempt, by) if world.rank == 0 else None)
    url, model = world.gather(None if own is None else (own.urls[0], own.model))[0]
    return Served(url=url, model=model, own=own)


def _started(start: StartSpec, attempt: AttemptDir, by: Starter) -> JudgeServers:
    try:
        return JudgeServers("", start, attempt.logs, by, teacher=True)
    except OSError as error:
        raise RftError(f"the teacher's server cannot be started: {error}") from error


def await_teacher(served: Served | None, world: World) -> None:
    """Until it is ready; RftError on every rank alike. Collective where there is one."""
    if served is None:
        return
    try:
        agreed(world, lambda: None if served.own is None else served.own.wait())
    except BaseException:
        served.stop()
        raise
