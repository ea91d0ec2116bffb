"""A file of lines that every rank writes a part of: `samples/step_N.jsonl`, `evals/step_N.samples.jsonl`.

Each rank writes its lines as they come, beside the target; rank 0 then copies them in order and renames. Nobody holds more than one line and, on
rank 0, an index of (key, place).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rftcli.protocols import World


class PartFile:
    """This rank's part of `target`. `write` any number of lines, then `merge`, which is collective."""

    def __init__(self, world: World, target: Path) -> None:
        self._world = world
        self._target = target
        self._file = _part(target, world.rank).open("w", encoding="utf-8", errors="backslashreplace")

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def merge(self) -> None:
        """All ranks' lines by set, draw and sample under the target's name; the parts go away."""
        self._file.close()
        self._world.barrier(f"parts of {self._target.name}")
        if self._world.rank != 0:
            return
        paths = [_part(self._target, rank) for rank in range(self._world.size)]
        places = sorted(place for rank, path in enumerate(paths) for place in _index(rank, path))
        fresh = self._target.with_name(f".{self._target.name}.merged")
        files = [path.open("rb") for path in paths]
        try:
            with fresh.open("wb") as merged:
                for *_, rank, offset, length in places:
                    files[rank].seek(offset)
                    merged.write(files[rank].read(length))
        finally:
            for file in files:
                file.close()
        fresh.replace(self._target)
        for path in paths:
            path.unlink()


def merge_parts(world: World, target: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Lines that are at hand, as a `PartFile`. Collective."""
    part = PartFile(world, target)
    for line in lines:
        part.write(line)
    part.merge()


def _part(target: Path, rank: int) -> Path:
    return target.with_name(f".{target.name}.{rank}")


def _index(rank: int, path: Path) -> list[tuple[str, int, int, int, int, int]]:
    """(set, draw, sample, rank, offset, length) of every line."""
    found, offset = [], 0
    with path.open("rb") as file:
        for line in file:
            record = json.loads(line)
            found.append((str(record.get("set", "")), int(record["draw"]), int(record["sample"]), rank, offset, len(line)))
            offset += len(line)
    return found
