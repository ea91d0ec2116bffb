"""Verdicts that are kept for the whole run, also over a resume: one line each, one file a scorer and rank, in the run directory.

What is kept is what a scorer said about a text, under a hash of the text and of everything about the scorer that changes its scores, what its files
hold included (`files`); another prompt or checkpoint finds nothing. What a service runs cannot be seen from here: it is known by what the recipe says
of it alone. Errors are not kept. Each rank writes its own file and reads all of them when it starts.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rftcli.codec import to_data
from rftcli.events import gap
from rftcli.rewards.scorers.files import fingerprint
from rftcli.rewards.scorers.spec import ScorerSpec
from rftcli.rewards.scorers.verdict import Verdict
from rftcli.rewards.scorers.view import canonical

PASSING = ("name", "cache", "service", "batch_size", "memory_gib")
"""Fields of a scorer that do not change what it says."""
PASSING_WEIGHTS = ("given", "parameters", "offload", "sharded", "batch_tokens", "beside_gib")
PASSING_START = ("given", "parameters", "servers", "tensor_parallel", "gpus", "memory_share", "cache_bytes", "ready_seconds", "command", "sleeps")


class Cache:
    """`folder` is made with the first score. A line that was cut short, by a kill, is passed over."""

    def __init__(self, folder: Path, spec: ScorerSpec, rank: int, files: Iterable[Path] = ()) -> None:
        """`files`: checkpoint, tokenizer, source of a class: what the scorer reads."""
        data: dict[str, Any] = {name: value for name, value in to_data(spec).items() if name not in PASSING}
        if spec.weights is not None:
            data["weights"] = {name: value for name, value in data["weights"].items() if name not in PASSING_WEIGHTS}
        if spec.start is not None:
            data["start"] = {name: value for name, value in data["start"].items() if name not in PASSING_START}
        self._identity = f"{canonical(data)}\n{fingerprint(files)}"
        self._file = folder / f"{spec.name}.rank_{rank}.jsonl"
        self._known: dict[str, Verdict] = {}
        for path in sorted(folder.glob(f"{glob.escape(spec.name)}.rank_*.jsonl")) if folder.is_dir() else ():
            self._read(path)
        self._torn = bool(gap(self._file))

    def get(self, key: str) -> Verdict | None:
        return self._known.get(self._hash(key))

    def put(self, key: str, verdict: Verdict) -> None:
        name = self._hash(key)
        if name in self._known:
            return
        self._known[name] = verdict
        said = [name, verdict.value, dict(verdict.extra)] if verdict.extra else [name, verdict.value]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(("\n" if self._torn else "") + json.dumps(said) + "\n")
        self._torn = False

    def _hash(self, key: str) -> str:
        return hashlib.sha256(f"{self._identity}\n{key}".encode("utf-8", "surrogatepass")).hexdigest()

    def _read(self, path: Path) -> None:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                name, value, *more = json.loads(line)
            except (ValueError, TypeError):
                continue
            extra = more[0] if more else {}
            if isinstance(name, str) and isinstance(value, float) and math.isfinite(value) and isinstance(extra, dict):
                self._known[name] = Verdict(value=value, extra=extra)
