"""completions/ is fresh, loads in bash, and offers what the commands have."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def generator():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("make_completions", ROOT / "scripts" / "make_completions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["rft.bash", "_rft", "rft.fish"])
def test_fresh(name: str) -> None:
    assert (ROOT / "completions" / name).read_text() == generator().FILES[name](), "run `make completions`"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("rft tr", "train"), ("rft val", "validate-recipe"), ("rft train --run-", "--run-dir"), ("rft plan --o", "--out"), ("rft --ver", "--version")],
)
def test_bash_completes(typed: str, expected: str) -> None:
    script = f"""
source {ROOT}/completions/rft.bash
COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _rft; echo "${{COMPREPLY[@]}}"
"""
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [expected]
