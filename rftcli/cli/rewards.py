"""`rft rewards try`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcli.cli import talk
from rftcli.errors import EXIT_FAILED, EXIT_INTERRUPTED, UsageError

if TYPE_CHECKING:
    from rftcli.runtime.try_rewards import Part, Tried

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
    as_json: talk.Json = False,
) -> int:
    """Score completions with a recipe's rewards; no model is loaded."""
    if action != "try":
        raise UsageError(f"`rft rewards {action}` is no command", hint="rft rewards try RECIPE")
    from rftcli.runtime import prepare
    from rftcli.runtime.try_rewards import as_data, try_rewards

    try:
        tried = try_rewards(prepare.load(recipe, sets), count=rows, completions=completions)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)  # a reward function that never returns holds a thread, which Python would wait for
    if as_json:
        talk.data(as_data(tried))
    else:
        print(talk.plain(as_text(tried)))
    return EXIT_FAILED if any(sample.error or any(part.error for part in sample.parts) for sample in tried.samples) else 0


def as_text(tried: Tried) -> str:
    """A table of the parts, a table of the first completions, and the errors."""
    from rftcli.observe.text import clean, short

    def number(value: float | None) -> str:
        return "-" if value is None else short(value)

    several = len({part.label for part in tried.parts}) > 1

    def name(part: Part) -> str:
        return f"{part.label}.{part.name}" if several else part.name

    parts = [["part", "weight", "scored", "abstained", "errors", "mean", "min", "max", "seconds"]]
    parts += [
        [
            name(part), f"{part.weight:g}", str(part.scored), str(part.abstained),
            str(sum(part.errors.values())), number(part.mean), number(part.least), number(part.greatest), short(part.seconds),
        ]
        for part in tried.parts
    ]  # fmt: skip
    shown = [["prompt", "sample", "answer", "parts", "reward"]]
    for sample in tried.samples[:SHOWN]:
        completion = sample.completion
        values = ", ".join(f"{part.name} {'error' if part.error else number(part.value)}" for part in sample.parts)
        shown.append([clean(completion.prompt.row_id, CELL), str(completion.sample), clean(completion.text, CELL), values, number(sample.reward)])
    lines = [f"{len(tried.samples)} completions: {tried.what}", "", *_columns(parts), "", *_columns(shown)]
    if len(tried.samples) > SHOWN:
        lines.append(f"... and {len(tried.samples) - SHOWN} more (--json has all)")
    if tried.changed is not None:
        lines += ["", f"recorded rewards that differ from these: {tried.changed}"]
    errors = [f"{name(part)}: {count} x {text}" for part in tried.parts for text, count in part.errors.items()]
    errors += [f"combine: {text}" for text in dict.fromkeys(sample.error for sample in tried.samples if sample.error)]
    return "\n".join([*lines, *(["", "errors:", *(f"  {text}" for text in errors)] if errors else [])])


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
