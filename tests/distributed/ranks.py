"""Runs one function on several real ranks (gloo, CPU) and brings back what each of them returned."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 240


def on_ranks(size: int, target: str, **arguments: Any) -> list[Any]:
    """`target` names a function of `work.py`, called as fn(world, **arguments) on every rank; its results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            environment = {
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)},
                **{"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
            }
            command = [sys.executable, str(HERE / "work.py"), folder, target, json.dumps(arguments)]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        try:
            outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [f"rank {rank}:\n{text[-3000:]}" for rank, (process, text) in enumerate(zip(processes, outputs, strict=True)) if process.returncode]
        assert not failed, "\n".join(failed)
        return [pickle.loads((Path(folder) / f"result_{rank}").read_bytes()) for rank in range(size)]
