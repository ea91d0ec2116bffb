"""`rft resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk, where
from rftcli.cli.train import Quiet, Smoke, go_on

app = typer.Typer(add_completion=False)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    sets: talk.Sets = [],  # noqa: B006 - typer copies it
    step: Annotated[int | None, typer.Option("--step", help="Go back to this checkpoint; default: the newest whole one.", min=1)] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Go on although risky changes make it another run.")] = False,
    fork: Annotated[str | None, typer.Option("--fork", help="Leave this run as it is; a new one of this name starts from its checkpoint.")] = None,
    ranks: talk.Ranks = None,
    gpus: talk.Gpus = None,
    smoke: Smoke = False,
    nodes: where.Nodes = None,
    hostfile: where.Hostfile = None,
    launcher: where.Launcher = None,
    quiet: Quiet = False,
    as_json: talk.Json = False,
) -> int:
    """Go on with a run from its last whole checkpoint."""
    from rftcli.runtime import disk, start
    from rftcli.runtime.rundir import RunDir

    run = RunDir(run_dir)
    place = where.where_before(run, ranks=ranks, gpus=gpus, nodes=nodes, hostfile=hostfile, launcher=launcher)
    if place.follows:
        return place.follow()
    with place.leading():
        resumption = start.resumption(
            run, step=step, sets=sets, ranks=ranks, gpus=gpus, accept=accept, to_fork=fork is not None, several=place.several
        )
        if smoke:
            from rftcli.cli.smoking import smoke_test

            place.refuse_several("--smoke")
            return smoke_test(resumption.plan, run.path, resumption.checkpoint, step=resumption.step, as_json=as_json)
        if fork is not None:
            from rftcli.runtime.fork import fork as make_fork

            run, resumption = make_fork(run, resumption, fork)
        for text in disk.check(resumption.plan, run.path):
            talk.say(f"warning: {text}")
        return go_on(run, resumption, place, quiet=quiet, as_json=as_json)
