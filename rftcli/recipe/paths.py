"""Dotted paths of keys: `rewards.math.parts[0].weight`, with quotes round a name that holds more than letters, digits, `_` and `-`.

What is left out: what stands at a path (`tree`), and paths of files (`read`).
"""

from __future__ import annotations

import re

KeyPath = tuple[str | int, ...]
"""Keys and list indexes from the top: ("data", "train", 0, "path")."""

_PLAIN = re.compile(r"[\w-]+\Z")
_PIECE = re.compile(r"""\[(?P<index>\d{1,9})\]|(?P<dot>\.?)(?:"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'|(?P<plain>[^.\[\]"'\s=]+))""")


def format_path(path: KeyPath) -> str:
    """
    >>> format_path(("data", "eval", "a.b", "columns")), format_path(("data", "train", 0))
    ('data.eval."a.b".columns', 'data.train[0]')
    """
    text = ""
    for piece in path:
        if isinstance(piece, int):
            text += f"[{piece}]"
            continue
        if not _PLAIN.match(piece):
            piece = '"' + piece.replace("\\", "\\\\").replace('"', '\\"') + '"'
        text += f".{piece}" if text else piece
    return text


def parse_path(text: str) -> KeyPath:
    """The inverse of `format_path`. Raises ValueError saying what is wrong and where, as (message, offset)."""
    return tuple(piece for piece, _, _ in parse_pieces(text))


def parse_pieces(text: str) -> list[tuple[str | int, int, int]]:
    """(piece, offset in `text`, length) of every piece. Raises ValueError(message, offset)."""
    pieces: list[tuple[str | int, int, int]] = []
    at = 0
    while at < len(text):
        match = _PIECE.match(text, at)
        if match is None:
            raise ValueError("expected a key, a quoted key or an index", at)
        if match["index"] is not None:
            if not pieces:
                raise ValueError("a path starts with a key", at)
            pieces.append((int(match["index"]), at, match.end() - at))
        else:
            if bool(match["dot"]) != bool(pieces):
                raise ValueError("keys are separated by one dot", at)
            start = at + len(match["dot"])
            pieces.append((_unquoted(match), start, match.end() - start))
        at = match.end()
    if not pieces:
        raise ValueError("expected a key", 0)
    return pieces


def _unquoted(match: re.Match[str]) -> str:
    if match["double"] is not None:
        return re.sub(r"\\(.)", r"\1", match["double"], flags=re.DOTALL)
    return match["single"] if match["single"] is not None else match["plain"]


def related(one: KeyPath, other: KeyPath) -> bool:
    """Is one of them the other, or above it?

    >>> related(("data",), ("data", "train", 0)), related(("data", "eval"), ("data", "train"))
    (True, False)
    """
    short = min(len(one), len(other))
    return one[:short] == other[:short]
