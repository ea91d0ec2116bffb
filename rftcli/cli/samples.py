"""`rft samples`."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcli.cli import talk
from rftcli.errors import UsageError

if TYPE_CHECKING:
    from rich.panel import Panel

app = typer.Typer(add_completion=False)

SHOWN = 10
"""Completions on the screen unless a number is asked for."""


@app.command()
def samples(
    run_dir: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    step: Annotated[int | None, typer.Option("--step", help="Which step; default: the newest with samples.", min=0)] = None,
    last: Annotated[bool, typer.Option("--last", help="The newest step with samples, which is the default.")] = False,
    label: Annotated[str | None, typer.Option("--label", help="Only completions of this label.")] = None,
    sort: Annotated[str | None, typer.Option("--sort", help="reward, length or advantage; with a minus the largest first.")] = None,
    best: Annotated[int | None, typer.Option("--best", help="The so many of the highest reward.", min=1)] = None,
    worst: Annotated[int | None, typer.Option("--worst", help="The so many of the lowest reward.", min=1)] = None,
    count: Annotated[int | None, typer.Option("--count", help=f"How many to show; default: {SHOWN}, with --json all.", min=1)] = None,
    evals: Annotated[bool, typer.Option("--eval", help="Completions of the evaluation instead of training.")] = False,
    as_json: talk.Json = False,
) -> int:
    """Show completions of a run with their rewards."""
    from rftcli.observe import sample_view

    if last and step is not None:
        raise UsageError("--last and --step exclude each other")
    if sum(item is not None for item in (best, worst, sort)) > 1:
        raise UsageError("--best, --worst and --sort exclude each other", hint="--sort -reward --count N is --best N")
    path = sample_view.samples_file(run_dir, step=step, evals=evals)
    found = list(sample_view.read_lines(path, lambda line: label is None or line.get("label") == label))
    if not found:
        held = sorted({str(line.get("label")) for line in sample_view.read_lines(path, lambda line: True)}) if label else []
        hint = f"it holds completions of {', '.join(held)}" if held else None
        raise UsageError(f"{path} holds no completion" + (f" of the label `{label}`" if label else ""), hint=hint)
    order = "-reward" if best is not None else "reward" if worst is not None else sort
    limit = best or worst or count or (None if as_json else SHOWN)
    shown = sample_view.chosen(found, sort=order, count=limit)
    if as_json:
        talk.data(shown)
        return 0
    try:
        _print(shown, f"{path}: {len(shown)} of {len(found)} completions")
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _print(lines: list, headline: str) -> None:  # type: ignore[type-arg]
    """In colour on a terminal, plain text elsewhere."""
    from rftcli.observe import sample_view

    if not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        print("\n\n".join([headline, *map(sample_view.plain, lines)]), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(headline, style="dim"))
    for line in lines:
        console.print(_panel(line, console.width))


def _panel(line: Mapping[str, Any], columns: int) -> Panel:
    """One completion in a frame; what the frame's title has no room for stands below it."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from rftcli.observe import sample_view

    title, *rest = textwrap.wrap(sample_view.head(line), max(columns - 6, 20), break_on_hyphens=False)
    body = Table.grid(padding=(0, 1))
    body.add_column(min_width=11)
    body.add_column(overflow="fold")
    if rest:
        body.add_row("", Text(" ".join(rest), style="dim"))
    for name, text in sample_view.fields(line):
        body.add_row(Text(name, style="dim"), Text(text, style="" if name == "completion" else "cyan"))
    reward = line.get("reward")
    style = "yellow" if reward is None else "green" if reward > 0 else "red"
    return Panel(body, title=Text(title.strip(" |")), title_align="left", border_style=style)
