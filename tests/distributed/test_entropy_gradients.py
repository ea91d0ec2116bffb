"""The entropy bonus reaches every weight alike under ZeRO, with the head in chunks whose number differs by rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

# layout, ZeRO stage, uneven shares (9 rows against 3), positions per head chunk (0: all at once)
SHARDED = [("padded", 0, True, 0), ("packed", 2, False, 5), ("padded", 3, True, 5)]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    plain = {"layout": "padded", "micro": 12, "zero": 0}
    found = on_ranks(1, {"bonus": ("gradient", {**plain, "entropy": 0.5}), "none": ("gradient", plain)})
    calls = {
        f"{layout} {zero}": ("gradient", {"layout": layout, "micro": 3, "zero": zero, "uneven": uneven, "chunk_tokens": chunk, "entropy": 0.5})
        for layout, zero, uneven, chunk in SHARDED
    }
    return found | on_ranks(2, calls)


@pytest.mark.parametrize(("layout", "zero", "uneven", "chunk"), SHARDED)
def test_the_same_gradient(results: dict[str, Any], layout: str, zero: int, uneven: bool, chunk: int) -> None:
    (expected,) = results["bonus"]
    for found in results[f"{layout} {zero}"]:
        for name, gradient in expected["gradient"].items():
            assert float((found["gradient"][name] - gradient).abs().max()) / float(gradient.abs().max()) < 1e-5, name
        assert found["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-5)


def test_the_bonus_is_felt(results: dict[str, Any]) -> None:
    (bonus,), (none,) = results["bonus"], results["none"]
    assert bonus["norm"] != pytest.approx(none["norm"], rel=1e-3)
    assert bonus["metrics"]["loss"] == pytest.approx(none["metrics"]["loss"] - 0.5 * none["metrics"]["entropy"], rel=1e-5)
