"""What every command shares: errors on stderr, data on stdout, and the options that several commands have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rftcli.errors import RecipeError, RftError

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe (YAML), or the name of a shipped one.", show_default=False)]
Sets = Annotated[list[str], typer.Option("--set", help="Override a key: dotted.path=value, the value in YAML. Repeatable.", metavar="KEY=VALUE")]
Json = Annotated[bool, typer.Option("--json", help="Data as JSON on stdout, talk on stderr.")]
Ranks = Annotated[int | None, typer.Option("--ranks", help="Processes on the CPU (GPUs are left alone).", min=1)]
Gpus = Annotated[int | None, typer.Option("--gpus", help="GPUs to use; default: all.", min=1)]


def say(text: str) -> None:
    """Talk goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def data(value: Any) -> None:
    """Data goes to stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def show_error(error: RftError) -> None:
    if isinstance(error, RecipeError):
        say(error.message)  # rendered already, with its places and hints
        return
    say(f"error: {error.message}")
    if error.hint is not None:
        say(f"hint: {error.hint}")
