"""`rft resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk
from rftcli.cli.train import Quiet

app = typer.Typer(add_completion=False)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    step: Annotated[int | None, typer.Option("--step", help="Go back to this checkpoint; default: the newest whole one.", min=1)] = None,
    quiet: Quiet = False,
    as_json: talk.Json = False,
) -> int:
    """Go on with a run from its last whole checkpoint."""
    from rftcli.cli.watch import finish, watchers
    from rftcli.runtime import start
    from rftcli.runtime.rundir import RunDir

    run = RunDir(run_dir)
    resumption = start.resumption(run, step=step)
    talk.say(resumption.text)
    if resumption.nothing_to_do:
        return 0
    outcome = start.resume(run, resumption, watchers(run, quiet=quiet or as_json))
    return finish(run, outcome, as_json=as_json)
