"""`rft rewards try`."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcli.cli import talk
from rftcli.errors import EXIT_FAILED, EXIT_INTERRUPTED, UsageError

if TYPE_CHECKING:
    from rftcli.runtime.try_report import OneTried, Part, Tried

app = typer.Typer(add_completion=False)
SHOWN = 10
"""Completions in the table of rewards."""
CELL = 34


@app.command()
def rewards(
    action: Annotated[str, typer.Argument(help="try", metavar="try", show_default=False)],
    recipe: talk.RecipeArgument,
    sets: talk.Sets = [],  # noqa: B006 - typer copies it
    rows: Annotated[int | None, typer.Option("--rows", help="How many rows, or completions of the file.", min=1)] = None,
    completions: Annotated[
        Path | None, typer.Option("--completions", help="Completions to score, one JSON object a line, such as a run's samples; default: references.")
    ] = None,
    no_models: Annotated[bool, typer.Option("--no-models", help="Load no scorer's model: its parts, and rewards with them, are left out.")] = False,
    as_json: talk.Json = False,
) -> int:
    """Score completions with a recipe's rewards; the policy is not loaded."""
    if action != "try":
        raise UsageError(f"`rft rewards {action}` is no command", hint="rft rewards try RECIPE")
    from rftcli.runtime import prepare
    from rftcli.runtime.try_report import as_data
    from rftcli.runtime.try_rewards import try_rewards

    try:
        with redirect_stdout(sys.stderr):  # libraries and functions of the user may print, and stdout is for what was found
            tried = try_rewards(prepare.load(recipe, sets), count=rows, completions=completions, models=not no_models, say=talk.say)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)  # a reward function that never returns holds a thread, which Python would wait for
    if as_json:
        talk.data(as_data(tried))
    else:
        print(talk.plain(as_text(tried)))
    return EXIT_FAILED if tried.failed else 0


def as_text(tried: Tried) -> str:
    """A table of the parts, a table of the first completions, and the errors."""
    from rftcli.observe.text import clean, short

    def number(value: float | None) -> str:
        return "-" if value is None else short(value)

    found = list(tried.parts())
    several = len({part.label for part in found}) > 1
    what = "reward, shaped" if tried.shaped else "reward"

    def name(part: Part) -> str:
        own = what if part.name is None else part.name
        return f"{part.label}.{own}" if several else own

    def cells(part: Part) -> list[str]:
        numbers = ["left out", "", ""] if part.left_out else [number(part.mean), number(part.least), number(part.greatest)]
        return [
            name(part), "" if part.weight is None else f"{part.weight:g}", str(part.scored), str(part.abstained), str(sum(part.errors.values())),
            *numbers, "" if part.seconds is None or part.left_out else short(part.seconds),
        ]  # fmt: skip

    def rewards_of(one: OneTried) -> list[str]:
        if one.left_out:
            return [f"without {', '.join(one.left_out)}"] * (1 + tried.shaped)
        masked = one.sample.shaped is not None and one.sample.shaped.masked
        return [number(one.combined), *([] if not tried.shaped else ["masked" if masked else number(one.sample.reward)])]

    parts = [["part", "weight", "scored", "abstained", "errors", "mean", "min", "max", "seconds"], *map(cells, found)]
    shown = [["prompt", "sample", "answer", "parts", *(["combined", "reward, shaped"] if tried.shaped else ["reward"])]]
    for one in tried.completions[:SHOWN]:
        completion = one.sample.completion
        values = ", ".join(
            f"{part.name} {'left out' if part.name in one.left_out else 'error' if part.error else number(part.value)}" for part in one.sample.parts
        )
        shown.append([clean(completion.prompt.row_id, CELL), str(completion.sample), clean(completion.text, CELL), values, *rewards_of(one)])
    lines = [f"{len(tried.completions)} completions: {tried.what}", "", *_columns(parts), "", *_columns(shown)]
    if len(tried.completions) > SHOWN:
        lines.append(f"... and {len(tried.completions) - SHOWN} more (--json has all)")
    if tried.logged:
        lines += ["", f"logged, means: {', '.join(f'{name} {number(value)}' for name, value in tried.logged.items())}"]
    if tried.changed is not None:
        lines += ["", f"recorded rewards that differ from these: {tried.changed}"]
    if tried.left_out:
        lines += ["", f"left out: {', '.join(tried.left_out)}, and the rewards they are part of; without --no-models their models are loaded"]
    lines += ["", *tried.notes] if tried.notes else []
    errors = [
        f"{'combine' if part.name is None else name(part)}: {count} x {text} (first at {part.first[text]})"
        for part in found
        for text, count in part.errors.items()
    ]
    return "\n".join([*lines, *(["", "errors:", *(f"  {text}" for text in errors)] if errors else [])])


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
