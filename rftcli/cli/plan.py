"""`rft plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk, where
from rftcli.errors import UsageError

app = typer.Typer(add_completion=False)


@app.command()
def plan(
    recipe: talk.RecipeArgument,
    sets: talk.Sets = [],  # noqa: B006 - typer copies it
    ranks: talk.Ranks = None,
    gpus: talk.Gpus = None,
    nodes: where.Nodes = None,
    hostfile: where.Hostfile = None,
    launcher: where.Launcher = None,
    machine: Annotated[str | None, typer.Option("--machine", help="Plan for another machine: 8xH100-80, 2x8xH100-80, 4xCPU-64.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan here; `rft train PLAN` runs it.")] = None,
    as_json: talk.Json = False,
) -> int:
    """Show what a recipe would do on this machine, or on another."""
    from rftcli.codec import to_data
    from rftcli.plan.plan import plan_to_json
    from rftcli.plan.show import plan_text
    from rftcli.probe.lengths import lengths_text
    from rftcli.probe.machine import other_machine
    from rftcli.runtime import prepare
    from rftcli.runtime.rundir import write_text

    other = None
    if machine is not None:
        if (ranks, nodes, hostfile, launcher) != (None,) * 4:
            hint = "leave out the other options of place; --gpus N says that fewer train than there are"
            raise UsageError("--machine says how many GPUs or ranks there are, on how many machines", hint=hint)
        if recipe.suffix == ".json":
            raise UsageError("a plan is finished; --machine makes another one from a recipe")
        other = other_machine(machine, gpus)
    place = where.where(None, ranks=ranks, gpus=gpus, nodes=nodes, hostfile=hostfile, launcher=launcher) if other is None else None
    prepared = prepare.prepare(recipe, sets, ranks=ranks, gpus=gpus, several=None if place is None else place.several, other=other)
    for text in prepared.warnings:
        talk.say(f"warning: {text}")
    if out is not None:
        try:
            write_text(out, plan_to_json(prepared.plan))
        except OSError as error:
            raise UsageError(f"{out} cannot be written: {error.strerror}") from error
        talk.say(f"written to {out}; run it with `rft train {out}`")
    if as_json:
        talk.data(to_data(prepared.plan))
    else:
        print(talk.plain(plan_text(prepared.plan)))
        if prepared.lengths:
            print(talk.plain(f"\n{lengths_text(prepared.lengths)}"))
    return 0
