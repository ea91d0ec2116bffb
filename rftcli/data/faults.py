"""What every reader of rows shares: a record and its place, and the list of what could not be read.

A record that cannot be used is never skipped: readers put it into `Faults`, go on, and the caller raises once with the first few and the count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rftcli.errors import UsageError

Record = tuple[str, Mapping[str, Any]]
"""(place as a person finds it, columns): ("data/train.jsonl:3", {"prompt": "1+1?"})."""

SHOWN = 3
"""Different faults that are told in words; the others are counted."""


@dataclass(slots=True, kw_only=True)
class Faults:
    """Rows of one set that cannot be used: how many, and the first few kinds of fault.

    >>> faults = Faults(source="gsm8k")
    >>> faults.add("train.jsonl:2", "no column `answer`")
    >>> faults.count
    1
    """

    source: str
    count: int = 0
    shown: list[str] = field(default_factory=list)
    hint: str | None = None
    """Of the first one."""

    def add(self, place: str, problem: str, hint: str | None = None) -> None:
        if self.count == 0:
            self.hint = hint
        if len(self.shown) < SHOWN and all(not told.endswith(f": {problem}") for told in self.shown):
            self.shown.append(f"{place}: {problem}")
        self.count += 1

    def raise_if_any(self, num_good: int) -> None:
        """UsageError with the first faults and the count, if there is one. `num_good` rows were read without fault."""
        if not self.count:
            return
        rest = ""
        if self.count > 1:
            others = f"; others: {'; '.join(self.shown[1:])}" if len(self.shown) > 1 else ""
            rest = f" ({self.count} of {self.count + num_good} rows have a fault, this is the first{others})"
        raise UsageError(f"data set `{self.source}`: {self.shown[0]}{rest}", hint=self.hint)


def record_problem(record: Any) -> str | None:
    """Why something is no record; None if it is one."""
    if not isinstance(record, Mapping):
        return f"a row must be an object with columns, not {kind_of(record)}"
    names = [name for name in record if not isinstance(name, str)]
    return f"column names must be text, not {names[0]!r}" if names else None


def json_problem(record: Mapping[str, Any]) -> str | None:
    """Which column cannot go into a file of samples, and why; None if all can."""
    try:
        json.dumps(record, allow_nan=False)
        return None
    except (TypeError, ValueError, RecursionError):
        pass
    for name, value in record.items():
        try:
            json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return f"column `{name}` cannot be written as JSON: {error}"
    return None


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
