"""torch.compile changes no gradient under DeepSpeed, for ragged micro-batches, and no adapter."""

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


@pytest.mark.slow
def test_a_compiled_model_has_its_adapter_on_and_off() -> None:
    """A graph that was compiled with the adapter is not used without it: the reference stays the bare model, the merged policy the trained one."""
    calls = {
        "plain": ("lora_gradient", {"zero": 2, "dtype": "float32"}),
        "compiled": ("lora_gradient", {"zero": 2, "dtype": "float32", "compiled": True}),
    }
    results = on_ranks(1, calls, "models_work.py")
    (plain,), (compiled,) = results["plain"], results["compiled"]
    for name, gradient in plain["gradient"].items():
        scale = float(gradient.abs().max())
        assert float((compiled["gradient"][name] - gradient).abs().max()) / scale < 1e-4, name
    assert compiled["gradient"].keys() == plain["gradient"].keys()
    assert compiled["base is the reference"] < 1e-5 and compiled["adapter matters"] > 1e-3 and compiled["merged is the policy"] < 1e-4
