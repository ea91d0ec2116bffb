"""Gradients travel between ranks once an update, however many micro-batches it has, where a rank holds them whole: up to ZeRO 1.

From stage 2 on each micro-batch's gradients are reduced into the parts that ranks hold, which is what makes room.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

MICRO_BATCHES = 3
PARAMETERS = 97 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64) + 64
"""Of the small model."""
FEW = 100
"""Norms and flags; a gradient has more numbers."""
CASES = {"zero 0": {"zero": 0}, "zero 1": {"zero": 1}, "zero 1, bfloat16": {"zero": 1, "dtype": "bfloat16"}, "zero 2": {"zero": 2}}


@pytest.fixture(scope="module")
def told() -> dict[str, list[list[int]]]:
    calls: dict[str, Any] = {name: ("reduced", arguments) for name, arguments in CASES.items()}
    return on_ranks(2, calls, "reduced_work.py")


@pytest.mark.parametrize("name", [name for name in CASES if "zero 2" not in name])
def test_once_behind_the_last_micro_batch(told: dict[str, list[list[int]]], name: str) -> None:
    for *before, last, step in told[name]:
        assert len(before) == MICRO_BATCHES - 1
        assert all(numbers < FEW for numbers in before)
        assert last + step >= PARAMETERS


def test_stage_2_reduces_behind_each(told: dict[str, list[list[int]]]) -> None:
    """The test above would pass if nothing were counted."""
    for *before, _, _ in told["zero 2"]:
        assert all(numbers >= FEW for numbers in before)
