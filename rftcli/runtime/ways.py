"""The ways to start an attempt's ranks: on this machine, on several, or as one rank of a job that somebody else has started. No torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rftcli.codec import to_data
from rftcli.plan.plan import Plan
from rftcli.runtime.hosts import RANK_MODULE, Hosts, by_hand, start_command, start_environment
from rftcli.runtime.joined import Crew
from rftcli.runtime.rundir import AttemptDir
from rftcli.runtime.starter import END_NOW
from rftcli.runtime.travel import rank_environment, travelling
from rftcli.runtime.verdict import RankWatch, Watch
from rftcli.runtime.warden import FarWatch, Warden


class Way(Protocol):
    gentle: bool
    """May the process be asked to end, or only killed?"""
    death_signal: int
    """What the process gets when this one is gone."""

    def command(self, attempt: AttemptDir) -> list[str]: ...

    def environment(self, plan: Plan) -> dict[str, str]: ...

    def meeting(self) -> dict[str, Any]:
        """For launch.json: how ranks find each other, and what of the environment they take over."""
        ...

    def watch(self, attempt: AttemptDir, plan: Plan) -> Watch: ...

    def beat(self) -> None:
        """Called often while the ranks work."""

    @property
    def abandoned(self) -> bool:
        """Is whoever started this process as one of a job's gone?"""
        ...


@dataclass(slots=True)
class OneMachine:
    """The starter of this package, which does what DeepSpeed's launcher for one node does. Ranks meet through a file, so that no port is needed."""

    ranks: int
    gentle: bool = True
    death_signal: int = END_NOW
    abandoned: bool = False

    def command(self, attempt: AttemptDir) -> list[str]:
        return [sys.executable, "-m", "rftcli.runtime.starter", str(self.ranks), str(attempt.run.path), str(attempt.number)]

    def environment(self, plan: Plan) -> dict[str, str]:
        return {**os.environ, **rank_environment(plan)}

    def meeting(self) -> dict[str, Any]:
        return {"far": None}

    def watch(self, attempt: AttemptDir, plan: Plan) -> Watch:
        return RankWatch(attempt, plan.world.ranks)

    def beat(self) -> None:
        """Nobody listens."""


@dataclass(slots=True)
class ManyMachines:
    """DeepSpeed's launcher for many nodes. It is never asked to end: with pdsh it would end every job of this user that DeepSpeed has started on
    those machines. The wardens there end the ranks, and it ends with them."""

    hosts: Hosts
    plan: Plan
    """As it is written, with `${VAR}` in its texts: what is made of it lies in launch.json."""
    say: Callable[[str], None]
    """Told what to run by hand."""
    gentle: bool = False
    death_signal: int = signal.SIGKILL
    abandoned: bool = False

    def command(self, attempt: AttemptDir) -> list[str]:
        if self.hosts.launcher == "none":
            self.say(by_hand(self.hosts, attempt))
        return start_command(self.hosts, attempt)

    def environment(self, plan: Plan) -> dict[str, str]:
        return start_environment({**os.environ, **rank_environment(plan)})

    def meeting(self) -> dict[str, Any]:
        env = {"env": travelling(self.plan, os.environ), "launch_env": dict(self.plan.launch.env)}
        return {"far": "hosts", "hosts": to_data(self.hosts), "address": self.hosts.names[0], **env}

    def watch(self, attempt: AttemptDir, plan: Plan) -> Watch:
        return FarWatch(attempt, plan.world.ranks, plan.world.nodes)

    def beat(self) -> None:
        """The watch writes the command's own beat."""


@dataclass(slots=True)
class OneOfCrew:
    """This process's own rank, as a child. `node` names its warden."""

    crew: Crew
    gentle: bool = True
    death_signal: int = signal.SIGKILL
    _warden: Warden | None = field(default=None)
    _parent: int = field(default_factory=os.getppid)

    def command(self, attempt: AttemptDir) -> list[str]:
        self._warden = Warden(attempt, f"rank{self.crew.place.rank}", [self.crew.place.rank])
        return [sys.executable, "-u", "-m", RANK_MODULE, str(attempt.run.path), str(attempt.number)]

    def environment(self, plan: Plan) -> dict[str, str]:
        return {**os.environ, **rank_environment(plan), **self.crew.place.environment()}

    def meeting(self) -> dict[str, Any]:
        return {"far": "joined"}

    def watch(self, attempt: AttemptDir, plan: Plan) -> Watch:
        return FarWatch(attempt, plan.world.ranks, plan.world.ranks)

    def beat(self) -> None:
        assert self._warden is not None, "the command was asked for first"
        self._warden.look()

    @property
    def abandoned(self) -> bool:
        return os.getppid() != self._parent
