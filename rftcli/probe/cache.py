"""Facts of unchanged files, kept in the user's cache directory. An entry is named by everything that it follows from, so it is never wrong, only
absent; one that is damaged or cannot be written is no reason to stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rftcli.codec import from_data, to_data

T = TypeVar("T")
ENDS_BYTES = 65536
"""How much of either end of a file goes into its state: a copy that keeps size and time stamp but not the content is noticed there."""
SETTLED_SECONDS = 2.0
"""A file changed less than this ago is not relied on: it may be written again within the resolution of its time stamp."""


class FileState(NamedTuple):
    """What tells that a file is the one that was read: name, size, time stamp, and the bytes at its ends."""

    path: str
    size: int
    mtime_ns: int
    ends: str


def user_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/rft/data`, by default `~/.cache/rft/data`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rft" / "data"


def file_states(paths: Iterable[Path]) -> list[FileState]:
    found = []
    for path in paths:
        stat = path.stat()
        digest = hashlib.sha256()
        with path.open("rb") as file:
            digest.update(file.read(ENDS_BYTES))
            file.seek(max(0, stat.st_size - ENDS_BYTES))
            digest.update(file.read(ENDS_BYTES))
        found.append(FileState(str(path.resolve()), stat.st_size, stat.st_mtime_ns, digest.hexdigest()))
    return found


def settled(states: Sequence[FileState]) -> bool:
    """Whether the files are old enough that a later change shows."""
    return time.time() - max((state.mtime_ns for state in states), default=0) / 1e9 > SETTLED_SECONDS


def versions(packages: Sequence[str]) -> list[str | None]:
    """Of installed packages, by the names of their folders of metadata; None: not installed. (importlib.metadata takes 25 ms to be imported.)"""
    found: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for path in Path(folder).glob("*.dist-info"):
                package, _, version = path.stem.partition("-")
                found.setdefault(_plain(package), version)
    return [found.get(_plain(package)) for package in packages]


def _plain(package: str) -> str:
    return re.sub(r"[-_.]+", "_", package).lower()


def entry(folder: Path, *key: Any) -> Path:
    """The file of an entry that follows from `key`, which goes through JSON."""
    text = json.dumps(to_data(key), sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def load(path: Path, cls: type[T]) -> T | None:
    """What an entry holds; None if there is none or it is damaged."""
    try:
        return from_data(cls, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def kept(path: Path, cls: type[T], find: Callable[[], T], keep: Callable[[T], bool] = lambda _: True) -> T:
    """What an entry holds, else what `find` finds, which is stored where it is to be kept."""
    known = load(path, cls)
    if known is None:
        known = find()
        if keep(known):
            store(path, known)
    return known


def store(path: Path, facts: Any) -> None:
    """Whole or not at all: two commands may write the same entry."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", encoding="utf-8", delete=False) as file:
            json.dump(to_data(facts), file)
        Path(file.name).replace(path)
    except OSError:
        return
