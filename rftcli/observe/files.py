"""Small JSON files that another process may read at any moment. Leaves out everything about what is in them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty if there is no file. Raises ValueError if it holds something else."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file in one step: a reader sees the old content or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    beside.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")
    beside.replace(path)
