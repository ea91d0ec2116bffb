"""`rft export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk

app = typer.Typer(add_completion=False)


@app.command()
def export(
    target: Annotated[Path, typer.Argument(help="A checkpoint folder or a run directory.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Directory to make; never one that exists.", show_default=False)],
    what: Annotated[str, typer.Option("--what", help="policy, merged (a LoRA policy's whole weights), adapter or ema.")] = "policy",
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; default: as trained.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint of a run; default: final/, else the newest.", min=0)] = None,
) -> int:
    """Write a run's policy to a directory that from_pretrained loads."""
    from rftcli.runtime import export as room
    from rftcli.runtime.disk import size_text as size

    done = room.export(target, out, what=what, dtype=dtype, step=step)
    talk.say(f"{done.source} -> {done.out} ({size(done.bytes)})")
    return 0
