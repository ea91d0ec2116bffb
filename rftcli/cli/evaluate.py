"""`rft eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk, where
from rftcli.cli.train import Quiet, RunDirOption

app = typer.Typer(add_completion=False)


@app.command()
def evaluate(
    target: Annotated[Path, typer.Argument(help="A checkpoint folder, a run directory (its newest checkpoint), or a recipe.", show_default=False)],
    sets: talk.Sets = [],  # noqa: B006 - typer copies it
    run_dir: RunDirOption = None,
    ranks: talk.Ranks = None,
    gpus: talk.Gpus = None,
    nodes: where.Nodes = None,
    hostfile: where.Hostfile = None,
    launcher: where.Launcher = None,
    quiet: Quiet = False,
    as_json: talk.Json = False,
) -> int:
    """Score a checkpoint, a run or an untrained recipe on the evaluation sets."""
    from rftcli.cli.watch import finish, watchers
    from rftcli.runtime import start

    place = where.where(run_dir, ranks=ranks, gpus=gpus, nodes=nodes, hostfile=hostfile, launcher=launcher)
    if place.follows:
        return place.follow()
    with place.leading():
        place.check(run_dir or Path("runs"))
        job = start.evaluation(target, sets, run_dir, ranks=ranks, gpus=gpus, several=place.several)
        talk.say(f"evaluating {job.what}\nrun directory: {job.run.path}")
        outcome = start.evaluate(job, watchers(job.run, quiet=quiet or as_json), place.way(job.plan))
        return finish(job.run, outcome, as_json=as_json)
