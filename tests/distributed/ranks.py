"""Runs functions on several real ranks (gloo, CPU) and brings back what each of them returned.

Ranks stay for the next call: most of what a launch costs is imports. `leave` ends them; they also end when whoever started them is gone.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 480.0


Call = tuple[str, dict[str, Any]]
"""A function of `work.py` and its arguments beside the world."""


class Ranks:
    """`size` processes in one process group."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen[str]] = []
        self._told = 0
        for rank in range(size):
            environment = {
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)},
                **{"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
            }
            with self._log(rank).open("wb") as log:
                command = [sys.executable, str(HERE / "rank.py"), self._folder.name]
                pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
                self._processes.append(subprocess.Popen(command, env=environment, **pipe))

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"log_{rank}"

    def work(self, calls: Mapping[str, Call], module: str) -> dict[str, list[Any]]:
        """AssertionError with what a rank said where one of them fails; the others then end as well, and these ranks are of no more use."""
        self._told += 1
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([self._told, module, calls]) + "\n")
            process.stdin.flush()
        too_late = threading.Timer(LIMIT_SECONDS, self._kill)
        too_late.start()
        try:
            done = [process.stdout is not None and process.stdout.readline() == f"{self._told}\n" for process in self._processes]
        finally:
            too_late.cancel()
        failed = [f"rank {rank}:\n{self._log(rank).read_text(errors='replace')[-3000:]}" for rank, well in enumerate(done) if not well]
        assert not failed, "\n".join(failed)
        results = [pickle.loads((Path(self._folder.name) / f"result_{self._told}_{rank}").read_bytes()) for rank in range(len(done))]
        return {name: [result[name] for result in results] for name in calls}

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def leave(self) -> None:
        self._kill()
        for process in self._processes:
            process.communicate()
        self._folder.cleanup()


_started: dict[int, Ranks] = {}


def on_ranks(size: int, calls: Mapping[str, Call], script: str = "work.py") -> dict[str, list[Any]]:
    """Every call on every rank, one after another: name -> results in rank order. `script`: where the functions are."""
    ranks = _started.pop(size, None) or Ranks(size)
    try:
        results = ranks.work(calls, Path(script).stem)
    except BaseException:
        ranks.leave()
        raise
    _started[size] = ranks
    return results


def leave() -> None:
    while _started:
        _started.popitem()[1].leave()
