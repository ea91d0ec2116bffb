"""Tests with the real vLLM: `make test-vllm`, in an environment of its own. The usual suite does not come here.

Models are tiny, everything runs on a CPU; an engine takes 10 to 40 seconds to start, so one is shared by a module's tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` has it")
ROOT = Path(__file__).resolve().parents[2]
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
