"""What the files behind a scorer hold, in a few bytes: scores that were kept belong to a checkpoint, not to the name of its folder.

Small files count by their content, weights by size and time of change: reading gigabytes to save a forward pass would be no gain. A checkpoint that
was copied without its times is another one, and its texts are scored anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

READ_BYTES = 16 << 20
"""A longer file counts by size and time: tokenizers are read whole."""


def fingerprint(paths: Iterable[Path]) -> str:
    """Of files and folders with all that lies in them, in this order. A path where nothing is counts as such, by its name."""
    digest = hashlib.sha256()
    for path in paths:
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path)) if path.is_dir() else [path]
        for file in inside:
            name = str(file.relative_to(path)) if path.is_dir() else file.name
            digest.update(f"{name}\0{_content(file)}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _hidden(file: Path, folder: Path) -> bool:
    """Of version control, caches and the like."""
    return any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(folder).parts)


def _content(file: Path) -> str:
    try:
        found = file.stat()
        if found.st_size > READ_BYTES:
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return "nothing"
