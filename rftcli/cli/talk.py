"""What every command shares: errors on stderr, data on stdout, and the options that several commands have."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcli.errors import RecipeError, RftError
from rftcli.observe.text import clean

if TYPE_CHECKING:
    from rftcli.runtime.rundir import RunDir

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe (YAML), or the name of a shipped one.", show_default=False)]
Sets = Annotated[
    list[str],
    typer.Option(
        "--set", help="Override a key: dotted.path=value, in YAML. Mappings merge, lists replace, null removes. Repeatable.", metavar="KEY=VALUE"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Data as JSON on stdout, talk on stderr.")]
Ranks = Annotated[int | None, typer.Option("--ranks", help="Processes on the CPU (GPUs are left alone).", min=1)]
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""What the file system says about a path that a person gave or took away; anything else is looked at with its traceback."""
NOBODY_READS = (errno.EPIPE, errno.EIO)
"""What is said where the other end of a pipe, or the terminal, is gone."""
Gpus = Annotated[int | None, typer.Option("--gpus", help="GPUs to use; default: all.", min=1)]


def say(text: str) -> None:
    """Talk goes to stderr. Names and errors in it may come from anywhere: what would steer a terminal is taken out here."""
    try:
        print(plain(text), file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno not in NOBODY_READS:
            raise


def plain(text: str) -> str:
    """Text for a terminal, whole, with its lines, without control sequences."""
    return clean(text, len(text) + 3, lines=True)


def data(value: Any) -> None:
    """Data goes to stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def way_on(run: RunDir) -> str | None:
    """How a run that has ended too early goes on; None where it has no whole checkpoint."""
    whole = run.committed_checkpoints()
    return f"hint: `rft resume {run.quoted}` goes on from {whole[-1].name}" if whole else None


def show_error(error: RftError) -> None:
    if isinstance(error, RecipeError):
        say(error.message)  # rendered already, with its places and hints
        return
    say(f"error: {error.message}")
    if error.hint is not None:
        say(f"hint: {error.hint}")


def show_unusable(error: OSError) -> bool:
    """Say which path cannot be used as it has to be, and why; False: the error is about something else."""
    if error.errno not in UNUSABLE:
        return False
    try:
        Path.cwd()
    except FileNotFoundError:
        say("error: the current directory does not exist any more")
        say("hint: `cd` into one that does")
        return True
    if error.filename is None:
        return False
    say(f"error: {os.fsdecode(error.filename)}: {error.strerror}")
    return True


def show_full_disk(error: OSError) -> bool:
    """Say that a disk is full where the error says so; False: it says something else."""
    from rftcli.runtime import disk

    if not disk.is_full(error):
        return False
    where = Path(error.filename or ".")
    say(f"error: no space left on the disk: {error.filename or 'a file'} could not be written ({disk.free_text(where)})")
    say(f"hint: free space (`df -h {where.parent}`); a run that was going goes on with `rft resume RUN_DIR`")
    return True
