"""`rft eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcli.cli import talk, where
from rftcli.cli.train import Quiet, RunDirOption
from rftcli.errors import UsageError

if TYPE_CHECKING:
    from rftcli.runtime.compare import Other
    from rftcli.runtime.start import EvalJob

app = typer.Typer(add_completion=False)


@app.command()
def evaluate(
    target: Annotated[Path, typer.Argument(help="A checkpoint folder, a run directory (its newest checkpoint), or a recipe.", show_default=False)],
    sets: talk.Sets = [],  # noqa: B006 - typer copies it
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint of a run directory; default: the newest whole one.", min=1)] = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", help="Evaluate this one on the same prompts and test the difference: a checkpoint, a run, a recipe, or `base`."),
    ] = None,
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
    from rftcli.runtime import compare as comparing
    from rftcli.runtime import start

    other = None if compare is None else comparing.other_of(compare)
    place = where.where(run_dir, ranks=ranks, gpus=gpus, nodes=nodes, hostfile=hostfile, launcher=launcher)
    if place.follows:
        return place.follow()
    with place.leading():
        if other is not None and place.crew is not None:
            hint = "run it with --hostfile or on one machine"
            raise UsageError("--compare starts its ranks twice, which a job of another launcher cannot", hint=hint)
        place.check(run_dir or Path("runs"))
        job = start.evaluation(target, sets, run_dir, ranks=ranks, gpus=gpus, step=step, several=place.several)
        if other is not None:
            return _compare(job, other, place, quiet=quiet or as_json, as_json=as_json)
        talk.say(f"evaluating {job.what}\nrun directory: {job.run.path}")
        outcome = start.evaluate(job, watchers(job.run, quiet=quiet or as_json), place.way(job.plan))
        return finish(job.run, outcome, as_json=as_json, what="evaluation")


def _compare(job: EvalJob, other: Other, place: where.Where, *, quiet: bool, as_json: bool) -> int:
    """Both evaluations, one after the other, then the paired test."""
    from rftcli.cli.watch import finish, watchers
    from rftcli.runtime import compare as comparing
    from rftcli.runtime import start

    files = []
    for one in (job, None if other.samples is not None else comparing.second(job, other)):
        if one is None:
            continue
        talk.say(f"evaluating {one.what}\nrun directory: {one.run.path}")
        outcome = start.evaluate(one, watchers(one.run, quiet=quiet), place.way(one.plan))
        if outcome.exit_code:
            return finish(one.run, outcome, as_json=as_json, what="evaluation")
        files.append(comparing.samples_of(one))
    if other.samples is not None:
        files.append(other.samples)
    result = comparing.compare(files[0], files[1], names=(job.what, other.what), seed=job.plan.seed)
    path = comparing.write(job.run, result)
    if as_json:
        talk.data({"run_dir": str(job.run.path), **result})
    else:
        print(comparing.text(result), flush=True)
    talk.say(f"written to {path}")
    return 0
