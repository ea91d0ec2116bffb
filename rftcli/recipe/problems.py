"""What is wrong with a recipe, where, and how it is shown: one record and one renderer for YAML, schema, rules, `--set` and later scans of data.

What is left out: finding problems, and colour (whoever prints may add it).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rftcli.errors import RecipeError

LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
"""What YAML 1.1 counts as the end of a line."""
WIDEST_LINE = 160
"""Longer source lines are shown around the caret only."""


@dataclass(frozen=True, eq=False)
class Source:
    """A text that was read: a file, or the text of one `--set`."""

    name: str
    """As shown: the path as it was given, or `--set 1`."""
    text: str
    base: str
    """Absolute directory that relative paths in it start from."""

    @cached_property
    def lines(self) -> list[str]:
        return LINE_BREAK.split(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A stretch of one source line.

    >>> Place(source=Source("a.yaml", "seed: 1", "/"), line=1, column=7, length=1).text
    'seed: 1'
    """

    source: Source
    line: int
    """From 1."""
    column: int
    """From 1, in characters."""
    length: int
    """Characters under the caret; 0 is shown as one."""

    @property
    def text(self) -> str:
        lines = self.source.lines
        return lines[self.line - 1] if self.line <= len(lines) else ""

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    >>> Problem(code="unknown-key", path="rollout", message="unknown key `temp`", label="did you mean `temperature`?").to_json()["path"]
    'rollout'
    """

    code: str
    """Stable name of the kind of problem; `rft explain CODE` knows those of rules."""
    path: str
    """Dotted path of the key, or of its section if the key itself is unknown; empty for the whole recipe."""
    message: str
    place: Place | None = None
    label: str | None = None
    """A few words behind the caret: what was meant, or the reason."""
    allowed: tuple[str, ...] = ()
    """Keys or values that may stand here."""
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data; what does not apply is absent."""
        record: dict[str, Any] = {"code": self.code, "path": self.path, "message": self.message}
        if self.place is not None:
            place = self.place
            record |= {"file": place.source.name, "line": place.line, "column": place.column, "length": place.length, "text": place.text}
        optional = {"label": self.label, "allowed": list(self.allowed) or None, "hint": self.hint}
        return record | {key: value for key, value in optional.items() if value is not None}


def raise_problems(shown: str, problems: Iterable[Problem]) -> None:
    """Raise RecipeError with all `problems`, in the order in which they stand in the recipe; do nothing if there are none.

    `shown`: the recipe's path as the person gave it.
    """
    ordered = in_order(problems)
    if ordered:
        raise RecipeError(render(shown, ordered), tuple(ordered))


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """By file, line and column, without repetitions (an alias shows the same line to several keys). Those without a place come first."""
    unique: dict[tuple[object, ...], Problem] = {}
    for item in problems:
        at = ("", 0, 0) if item.place is None else (item.place.source.name, item.place.line, item.place.column)
        unique.setdefault((*at, item.message), item)
    return [unique[key] for key in sorted(unique, key=lambda key: key[:3])]


def render(shown: str, problems: Sequence[Problem]) -> str:
    """The text for a terminal: a header, then one block a problem."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"error: {count} in {shown}\n\n" + "\n\n".join(_block(shown, item) for item in problems)


def _block(shown: str, problem: Problem) -> str:
    where = str(problem.place) if problem.place is not None else shown
    lines = [f"{where}  {problem.path}  {problem.message}" if problem.path else f"{where}  {problem.message}"]
    if problem.place is not None:
        lines += _excerpt(problem.place, problem.label)
    elif problem.label:
        lines.append(f"  | {problem.label}")
    if problem.allowed:
        gutter = " " * (len(str(problem.place.line)) if problem.place is not None else 1)
        lines.append(f"{gutter} | allowed here: {', '.join(problem.allowed)}")
    if problem.hint:
        lines.append(f"hint: {problem.hint}")
    return "\n".join(_printable(line) for line in lines)


def _excerpt(place: Place, label: str | None) -> list[str]:
    number = str(place.line)
    gutter = " " * len(number)
    text, start = place.text, place.column - 1
    if len(text) > WIDEST_LINE:
        left = max(0, min(start - 40, len(text) - WIDEST_LINE))
        text, start = text[left : left + WIDEST_LINE], start - left
    width = max(1, _columns(text[start : start + place.length]))
    marks = _blank(text[:start]) + "^" * width + (f" {label}" if label else "")
    return [f"{gutter} |", f"{number} | {text}".rstrip(), f"{gutter} | {marks}"]


def _columns(text: str) -> int:
    """Terminal columns that `text` takes."""
    return sum(0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _blank(text: str) -> str:
    """As wide as `text`, whatever a terminal's tab stops are."""
    return "".join("\t" if char == "\t" else " " * _columns(char) for char in text)


def _printable(text: str) -> str:
    """Control characters, which could move the cursor, are shown as a replacement mark."""
    return "".join(char if char == "\t" or unicodedata.category(char)[0] != "C" else "\ufffd" for char in text)
