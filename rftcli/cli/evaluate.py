"""`rft eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk
from rftcli.cli.train import Quiet, RunDirOption

app = typer.Typer(add_completion=False)


@app.command()
def evaluate(
    target: Annotated[Path, typer.Argument(help="A checkpoint folder, a run directory (its newest checkpoint), or a recipe.", show_default=False)],
    sets: talk.Sets = [],  # noqa: B006 - typer copies it
    run_dir: RunDirOption = None,
    ranks: talk.Ranks = None,
    gpus: talk.Gpus = None,
    quiet: Quiet = False,
    as_json: talk.Json = False,
) -> int:
    """Score a checkpoint, a run or an untrained recipe on the evaluation sets."""
    from rftcli.cli.watch import finish, watchers
    from rftcli.runtime import start

    job = start.evaluation(target, sets, run_dir, ranks=ranks, gpus=gpus)
    talk.say(f"evaluating {job.what}\nrun directory: {job.run.path}")
    outcome = start.evaluate(job, watchers(job.run, quiet=quiet or as_json))
    return finish(job.run, outcome, as_json=as_json)
