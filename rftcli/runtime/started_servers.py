"""Servers that the run starts for its judges and its teacher: on their way before models load, awaited before the first rollout.

A run without any imports nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rftcli.plan.plan import Plan
    from rftcli.protocols import World
    from rftcli.runtime.judges import Judges
    from rftcli.runtime.rundir import AttemptDir
    from rftcli.runtime.teacher_server import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedServers:
    judges: Judges | None = None
    teacher: Served | None = None


def begin_servers(plan: Plan, world: World, attempt: AttemptDir, device: torch.device, *, learns: bool = True) -> StartedServers:
    """On their way; those beside the ranks ready. Without learning there is no teacher. Collective where there are any."""
    taught = learns and plan.teacher is not None and plan.teacher.start is not None
    if not taught and all(spec.start is None for spec in plan.scorers):
        return StartedServers()
    from rftcli.runtime.judge_servers import Starter
    from rftcli.runtime.judges import begin_judges
    from rftcli.runtime.teacher_server import begin_teacher

    starter = Starter(rank=world.rank, gpu=device.index, several=plan.world.nodes > 1)
    judges = begin_judges(plan.scorers, world, attempt, starter)
    return StartedServers(judges=judges, teacher=begin_teacher(plan, world, attempt, starter) if taught else None)


def await_servers(servers: StartedServers, plan: Plan, world: World) -> None:
    """Until all are ready; RftError on every rank alike. Collective where there are any."""
    if servers.judges is not None:
        from rftcli.runtime.judges import await_judges

        await_judges(servers.judges, plan.scorers, world)
    if servers.teacher is not None:
        from rftcli.runtime.teacher_server import await_teacher

        await_teacher(servers.teacher, world)
