"""torch.compile changes no gradient under DeepSpeed, for ragged micro-batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks


@pytest.mark.slow
def test_a_compiled_model_has_the_same_gradient() -> None:
    calls = {
        "plain": ("gradient", {"layout": "padded", "zero": 2, "micro": 3}),
        "compiled": ("gradient", {"layout": "padded", "zero": 2, "micro": 3, "compiled": True}),
    }
    results = on_ranks(1, calls)
    for plain, compiled in zip(results["plain"], results["compiled"], strict=True):
        for name, gradient in plain["gradient"].items():
            scale = float(gradient.abs().max())
            assert float((compiled["gradient"][name] - gradient).abs().max()) / scale < 1e-5, name
        assert compiled["norm"] == pytest.approx(plain["norm"], rel=1e-5)
