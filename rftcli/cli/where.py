"""Where the ranks of a command run, and the options of that: this machine, several, or a job that somebody else has started."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcli.cli import talk
from rftcli.codec import from_data
from rftcli.errors import EXIT_OK, UsageError
from rftcli.runtime import hosts as machines
from rftcli.runtime import joined
from rftcli.runtime.prepare import Several, machine_at_hand
from rftcli.runtime.rundir import AttemptDir, RunDir
from rftcli.runtime.travel import left_behind
from rftcli.runtime.warden import read_small

if TYPE_CHECKING:
    from rftcli.plan.plan import Plan
    from rftcli.runtime.ways import Way

Hostfile = Annotated[Path | None, typer.Option("--hostfile", help="Machines to run on, one a line: NAME slots=N.")]
Nodes = Annotated[int | None, typer.Option("--nodes", help="How many machines; --gpus and slots count on each.", min=1)]
Launcher = Annotated[str | None, typer.Option("--launcher", help="What starts the ranks there: pdsh, slurm, openmpi, none; default: pdsh.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    ranks: int | None
    gpus: int | None
    hosts: machines.Hosts | None
    crew: joined.Crew | None

    @property
    def several(self) -> Several | None:
        """Ranks and nodes, where it is not this machine alone that decides them."""
        if self.crew is not None:
            place = self.crew.place
            return Several(ranks=place.size, nodes=max(1, place.size // place.local_size), per_node=place.local_size)
        if self.hosts is not None:
            return Several(ranks=self.hosts.ranks, nodes=len(self.hosts.names), per_node=self.hosts.per_host)
        return None

    @property
    def follows(self) -> bool:
        """Is this process of a job only one of its ranks? Rank 0 does everything else."""
        return self.crew is not None and not self.crew.leads

    def follow(self) -> int:
        """Be that rank to the end; the exit code of the whole job."""
        from rftcli.runtime import launch
        from rftcli.runtime.ways import OneOfCrew

        assert self.crew is not None
        found = self.crew.ask()
        return launch.serve(found, OneOfCrew(self.crew)) if isinstance(found, AttemptDir) else found

    def leading(self) -> AbstractContextManager[None]:
        return joined.leading(self.crew) if self.crew is not None else contextlib.nullcontext()

    def nothing_to_do(self) -> None:
        """Nothing is started; the other processes of the job leave too."""
        if self.crew is not None:
            self.crew.refuse(EXIT_OK)

    def refuse_several(self, option: str) -> None:
        if self.several is not None:
            hint = "leave out --hostfile and --nodes, and start it outside of a job's launcher"
            raise UsageError(f"{option} runs on this machine alone", hint=hint)

    def check(self, folder: Path) -> None:
        """MachineError unless every machine answers and sees `folder`, or the folder it will lie in."""
        if self.hosts is None:
            return
        while not folder.is_dir():
            folder = folder.absolute().parent
        machines.check(self.hosts, folder)
        behind = left_behind()
        if behind and self.hosts.launcher == "pdsh":
            talk.say(f"warning: {', '.join(behind)} stays on this machine: secrets do not travel; log in on the nodes, or share the home directory")

    def way(self, plan: Plan) -> Way | None:
        from rftcli.runtime.ways import ManyMachines, OneOfCrew

        if self.crew is not None:
            return OneOfCrew(self.crew)
        if self.hosts is None:
            return None
        return ManyMachines(self.hosts, plan, say=talk.say)


def where(
    run_dir: Path | None, *, ranks: int | None, gpus: int | None, nodes: int | None, hostfile: Path | None, launcher: str | None
) -> Where:
    """What the options and the environment ask for. UsageError where they contradict each other, MachineError where it cannot be had."""
    asked = machines.Asked(hostfile=hostfile, nodes=nodes, launcher=launcher)
    crew = joined.crew_of(run_dir)
    if crew is not None:
        joined.check_options(crew, ranks=ranks, gpus=gpus, several=asked.several or launcher is not None)
        return Where(ranks=ranks, gpus=gpus, hosts=None, crew=crew)
    here = machine_at_hand(ranks, gpus).gpus if asked.several else 0
    return Where(ranks=ranks, gpus=gpus, hosts=machines.hosts_of(asked, ranks=ranks, gpus=gpus, gpus_here=here), crew=None)


def where_before(
    run: RunDir, *, ranks: int | None, gpus: int | None, nodes: int | None, hostfile: Path | None, launcher: str | None
) -> Where:
    """For a run that goes on: as the options say; without any, on the machines of its last attempt."""
    if ranks is not None or gpus is not None:
        return where(run.path, ranks=ranks, gpus=gpus, nodes=nodes, hostfile=hostfile, launcher=launcher)
    from rftcli.plan.plan import plan_from_json

    plan_file = run.attempt(run.last_attempt()).plan
    if hostfile is None and nodes is None and launcher is None and joined.crew_of(run.path) is None:
        told = read_small(run.attempt(run.last_attempt()).launch) or {}
        hosts = from_data(machines.Hosts, told["hosts"]) if "hosts" in told else None
        return Where(ranks=None, gpus=None, hosts=hosts, crew=None)
    plan = plan_from_json(plan_file.read_text(encoding="utf-8")) if plan_file.is_file() else None
    on_cpu = plan is not None and plan.world.device == "cpu"
    ranks = plan.world.ranks if plan is not None and on_cpu else None
    return where(run.path, ranks=ranks, gpus=None, nodes=nodes, hostfile=hostfile, launcher=launcher)
