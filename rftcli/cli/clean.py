"""`rft clean`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk
from rftcli.errors import RftError, UsageError

app = typer.Typer(add_completion=False)


@app.command()
def clean(
    run_dir: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    keep: Annotated[
        int | None, typer.Option("--keep", help="Remove older checkpoints too, but the newest N and the best that the run keeps.", min=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> int:
    """Remove what a killed run left half written, and old checkpoints if asked."""
    from rftcli.runtime import clean as room
    from rftcli.runtime.disk import size_text as size
    from rftcli.runtime.rundir import RunDir

    run = RunDir(run_dir)
    with room.at_rest(run):
        found = room.removals(run, keep=keep)
        if not found:
            talk.say(f"{run.path}: nothing to remove")
            return 0
        for item in found:
            print(f"{size(item.bytes):>9}  {item.path.relative_to(run.path)}  ({item.why})")
        total = size(sum(item.bytes for item in found))
        print(f"{total:>9}  in all", flush=True)
        if dry_run:
            return 0
        if not yes and not sys.stdin.isatty():
            raise UsageError("nothing was removed: there is nobody to ask", hint="--yes removes what is listed")
        if not yes and not typer.confirm("remove these?", err=True):
            talk.say("nothing was removed")
            return 0
        try:
            room.remove(found)
        except OSError as error:
            raise RftError(f"{error.filename} cannot be removed: {error.strerror}") from error
        talk.say(f"removed {total}")
    return 0
