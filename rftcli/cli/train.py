"""`rft train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcli.cli import talk, where
from rftcli.codec import to_data
from rftcli.runtime.rundir import RunDir

if TYPE_CHECKING:
    from rftcli.runtime.start import Resumption

app = typer.Typer(add_completion=False)

RunDirOption = Annotated[Path | None, typer.Option("--run-dir", help="Where everything of the run goes; default: runs/<name>-<utc time>.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Only problems and the summary.")]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="Only try it: two tiny steps with the real models, save, resume, evaluate, and one full-length micro-batch.")
]


def go_on(run: RunDir, resumption: Resumption, place: where.Where, *, quiet: bool, as_json: bool) -> int:
    """Resume, or say that nothing is left; the exit code."""
    from rftcli.cli.watch import finish, watchers
    from rftcli.runtime import start

    talk.say("\n".join([resumption.text, *(f"  {change}" for change in resumption.changes)]))
    if resumption.nothing_to_do:
        place.nothing_to_do()
        if as_json:
            talk.data({"run_dir": str(run.path), "exit_code": 0, **to_data(run.read_state())})
        return 0
    place.check(run.path)
    outcome = start.resume(run, resumption, watchers(run, quiet=quiet or as_json), place.way(resumption.plan), place.several)
    return finish(run, outcome, as_json=as_json)


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe, a plan.json, or the name of a shipped recipe; default: quickstart.")] = None,
    sets: talk.Sets = [],  # noqa: B006 - typer copies it
    run_dir: RunDirOption = None,
    ranks: talk.Ranks = None,
    gpus: talk.Gpus = None,
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="Start, or go on with what --run-dir (default: runs/<name>) holds: for schedulers.")
    ] = False,
    smoke: Smoke = False,
    nodes: where.Nodes = None,
    hostfile: where.Hostfile = None,
    launcher: where.Launcher = None,
    quiet: Quiet = False,
    as_json: talk.Json = False,
) -> int:
    """Train from a recipe: validate, plan, launch the ranks, watch."""
    from rftcli.cli.watch import finish, watchers
    from rftcli.runtime import disk, prepare, start

    source = Path("quickstart") if recipe is None else recipe
    place = where.where(run_dir, ranks=ranks, gpus=gpus, nodes=nodes, hostfile=hostfile, launcher=launcher)
    if place.follows:
        return place.follow()
    with place.leading():
        place.check(run_dir or Path("runs"))
        prepared = prepare.prepare(source, sets, ranks=ranks, gpus=gpus, several=place.several)
        for text in prepared.warnings:
            talk.say(f"warning: {text}")
        if smoke:
            from rftcli.cli.smoking import smoke_test

            place.refuse_several("--smoke")
            return smoke_test(prepared.plan, start.run_path(prepared.plan, run_dir), None, step=0, as_json=as_json)
        if resume_or_start:
            run_dir = run_dir or Path("runs") / prepared.plan.name
            if start.holds_run(run_dir):
                resumption = start.resumption(RunDir(run_dir), step=None, prepared=prepared)
                return go_on(RunDir(run_dir), resumption, place, quiet=quiet, as_json=as_json)
        for text in disk.check(prepared.plan, start.run_path(prepared.plan, run_dir)):
            talk.say(f"warning: {text}")
        run = start.create(prepared, run_dir, again=resume_or_start)
        talk.say(f"{prepared.plan.batch.equation}\nrun directory: {run.path}")
        outcome = start.train(run, prepared.plan, watchers(run, quiet=quiet or as_json), place.way(prepared.plan))
        return finish(run, outcome, as_json=as_json)
