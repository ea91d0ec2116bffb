"""`rft resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk, where
from rftcli.cli.train import Quiet

app = typer.Typer(add_completion=False)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    step: Annotated[int | None, typer.Option("--step", help="Go back to this checkpoint; default: the newest whole one.", min=1)] = None,
    nodes: where.Nodes = None,
    hostfile: where.Hostfile = None,
    launcher: where.Launcher = None,
    quiet: Quiet = False,
    as_json: talk.Json = False,
) -> int:
    """Go on with a run from its last whole checkpoint."""
    from rftcli.cli.watch import finish, watchers
    from rftcli.runtime import start
    from rftcli.runtime.rundir import RunDir

    run = RunDir(run_dir)
    place = where.where_before(run, nodes=nodes, hostfile=hostfile, launcher=launcher)
    if place.follows:
        return place.follow()
    with place.leading():
        resumption = start.resumption(run, step=step)
        talk.say(resumption.text)
        if resumption.nothing_to_do:
            place.nothing_to_do()
            return 0
        place.check(run.path)
        outcome = start.resume(run, resumption, watchers(run, quiet=quiet or as_json), place.way(resumption.plan), place.several)
        return finish(run, outcome, as_json=as_json)
