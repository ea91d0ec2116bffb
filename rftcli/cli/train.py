"""`rft train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk, where

app = typer.Typer(add_completion=False)

RunDirOption = Annotated[Path | None, typer.Option("--run-dir", help="Where everything of the run goes; default: runs/<name>-<utc time>.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Only problems and the summary.")]


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe, a plan.json, or the name of a shipped recipe; default: quickstart.")] = None,
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
    """Train from a recipe: validate, plan, launch the ranks, watch."""
    from rftcli.cli.watch import finish, watchers
    from rftcli.runtime import prepare, start

    source = Path("quickstart") if recipe is None else recipe
    place = where.where(run_dir, ranks=ranks, gpus=gpus, nodes=nodes, hostfile=hostfile, launcher=launcher)
    if place.follows:
        return place.follow()
    with place.leading():
        place.check(run_dir or Path("runs"))
        prepared = prepare.prepare(source, sets, ranks=ranks, gpus=gpus, several=place.several)
        for text in prepared.warnings:
            talk.say(f"warning: {text}")
        run = start.create(prepared, run_dir)
        talk.say(f"{prepared.plan.batch.equation}\nrun directory: {run.path}")
        outcome = start.train(run, prepared.plan, watchers(run, quiet=quiet or as_json), place.way(prepared.plan))
        return finish(run, outcome, as_json=as_json)
