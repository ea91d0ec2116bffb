"""Whole runs with an engine that has an environment of its own: fixtures for `with_vllm` and `with_sglang`, and what is read of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 540
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What an engine in the process of the tests is told of its place; a command would join that job."""


@pytest.fixture
def environment() -> dict[str, str]:
    """Of a command that joins no job."""
    alone = {name: value for name, value in os.environ.items() if name not in PLACE}
    return {**alone, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def rft(tmp_path: Path, environment: dict[str, str]) -> Callable[..., tuple[int, str]]:
    """Run one `rft` command to its end: (exit code, all it said)."""

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "rftcli", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        return done.returncode, done.stdout[-4000:] + done.stderr[-4000:]

    return run


def steps(run: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if line]
    return {line["step"]: line for line in lines if line["event"] == "step"}


def versions(run: Path, step: int) -> set[int]:
    """Of the weights that sampled the completions of a step."""
    return {json.loads(line)["policy_version"] for line in (run / "samples" / f"step_{step:06}.jsonl").read_text().splitlines()}
