"""The completions of a file, for `rft rewards try`: one JSON object a line, each known by its file and line, which every error names."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcli.errors import UsageError
from rftcli.rewards.spec import DEFAULT_LABEL
from rftcli.types import FinishReason

FORM = 'one object a line: {"completion": "..", "reference": ..}'
TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "completion": ("text", (str,)),
    "text": ("text", (str,)),
    "special_end": ("text", (str,)),
    "prompt": ("text", (str,)),
    "label": ("text", (str,)),
    "columns": ("an object", (dict,)),
    "tokens": ("a whole number", (int,)),
    "draw": ("a whole number", (int,)),
    "sample": ("a whole number", (int,)),
}
"""Key -> (what it is, its types). Other keys are not read, or may be anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    place: str
    """`completions.jsonl:3`"""
    record: Mapping[str, Any]


def read_lines(path: Path) -> Iterator[Line]:
    """The lines with a `completion` (a run's samples have more), empty ones left out. UsageError with file and line of one that cannot be used."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield _line(f"{path}:{number}", text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error


def _line(place: str, text: str) -> Line:
    try:
        record = json.loads(text.strip())
    except ValueError as error:
        raise UsageError(f"{place}: not JSON: {error}", hint=FORM) from None
    if not isinstance(record, dict) or "completion" not in record:
        raise UsageError(f"{place}: no text `completion`", hint=FORM)
    for key, (words, types) in TYPES.items():
        if key in record and (not isinstance(record[key], types) or isinstance(record[key], bool)):
            raise UsageError(f"{place}: `{key}` must be {words}, got {json.dumps(record[key])}", hint=FORM)
    if record.get("tokens", 0) < 0:
        raise UsageError(f"{place}: `tokens` must be at least 0, got {record['tokens']}", hint=FORM)
    finish, known = record.get("finish", "stop"), [str(reason) for reason in FinishReason]
    if finish not in known:
        raise UsageError(f"{place}: `finish` is {json.dumps(finish)}", hint=f"one of {', '.join(known)}")
    return Line(place=place, record=record)


def check_label(line: Line, label: str, entries: Collection[str]) -> None:
    """UsageError where no entry of `rewards` scores the line."""
    if label in entries or DEFAULT_LABEL in entries:
        return
    close = difflib.get_close_matches(label, entries, n=1)
    hint = f"did you mean `{close[0]}`? " if close else ""
    without = "" if "label" in line.record else "the line has no `label`, nor a `prompt_id` of a row that has one; "
    known = f"{hint}{without}there are rewards for {', '.join(entries)}"
    raise UsageError(f"{line.place}: there are no rewards for the label `{label}`", hint=known)
