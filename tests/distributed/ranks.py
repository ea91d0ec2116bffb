"""Runs one function on several real ranks (gloo, CPU) and brings back what each of them returned."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 480


Call = tuple[str, dict[str, Any]]
"""A function of `work.py` and its arguments beside the world."""


def on_ranks(size: int, calls: Mapping[str, Call], script: str = "work.py") -> dict[str, list[Any]]:
    """Every call on every rank, one after another in one launch: name -> results in rank order. `script`: where the functions are."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            environment = {
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)},
                **{"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
            }
            command = [sys.executable, str(HERE / script), folder, json.dumps(calls)]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        try:
            outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [f"rank {rank}:\n{text[-3000:]}" for rank, (process, text) in enumerate(zip(processes, outputs, strict=True)) if process.returncode]
        assert not failed, "\n".join(failed)
        results = [pickle.loads((Path(folder) / f"result_{rank}").read_bytes()) for rank in range(size)]
        return {name: [result[name] for result in results] for name in calls}
