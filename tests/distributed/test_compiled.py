"""torch.compile changes no gradient, for ragged micro-batches in both layouts, and compiles once for all their shapes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_compiled_model_has_the_same_gradient(layout: str) -> None:
    calls = {
        "plain": ("gradient", {"layout": layout, "zero": 2, "micro": 3}),
        "compiled": ("gradient", {"layout": layout, "zero": 2, "micro": 3, "compiled": True}),
    }
    results = on_ranks(2, calls)
    for plain, compiled in zip(results["plain"], results["compiled"], strict=True):
        for name, gradient in plain["gradient"].items():
            scale = float(gradient.abs().max())
            assert float((compiled["gradient"][name] - gradient).abs().max()) / scale < 1e-5, name
        assert compiled["norm"] == pytest.approx(plain["norm"], rel=1e-5)
