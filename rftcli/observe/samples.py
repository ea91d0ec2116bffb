"""The first few completions of a step, read from `samples/step_000010.jsonl` for a screen or a tracker.

Leaves out writing them, and reading all of them: an observer shows a handful, the whole text stays in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 8_000_000
"""A longer line is passed over, so that one runaway completion cannot fill an observer's memory."""


def samples_path(run_dir: Path, step: int) -> Path:
    return run_dir / "samples" / f"step_{step:06d}.jsonl"


def first_samples(run_dir: Path, step: int, rows: int) -> list[Mapping[str, Any]]:
    """Up to `rows` samples of a step, in file order; none if there is no file. Lines that are torn or too long are passed over."""
    path = samples_path(run_dir, step)
    found: list[Mapping[str, Any]] = []
    if not path.is_file():
        return found
    with path.open("rb") as file:
        while len(found) < rows and (line := file.readline(MAX_LINE_BYTES)):
            whole = line.endswith(b"\n")
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            if whole and (record := _record(line)) is not None:
                found.append(record)
    return found


def _record(line: bytes) -> Mapping[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
