"""Adapters, running means, refreshed references and frozen parts on two real ranks, under every ZeRO stage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

STAGES = [0, 1, 2, 3]
DTYPES = {"float32": 1e-5, "bfloat16": 0.02}
"""Largest relative error of a gradient against one rank's."""


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    calls = {dtype: ("lora_gradient", {"zero": 0, "dtype": dtype}) for dtype in DTYPES}
    return {name: results[0] for name, results in on_ranks(1, calls, "models_work.py").items()}


@pytest.fixture(scope="module")
def gradients() -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for zero in STAGES:
        for dtype in DTYPES:
            calls[f"gradient {zero} {dtype}"] = ("lora_gradient", {"zero": zero, "dtype": dtype})
        if zero in (0, 3):
            calls[f"checkpointing {zero}"] = ("lora_gradient", {"zero": zero, "dtype": "float32", "checkpointing": True})
    return on_ranks(2, calls, "models_work.py")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for zero in STAGES:
        for lora in (True, False):
            folder = str(tmp_path_factory.mktemp(f"follow{zero}{lora}"))
            calls[f"follow {zero} {lora}"] = ("follow", {"zero": zero, "lora": lora, "folder": folder})
        calls[f"go on {zero}"] = ("go_on_from", {"zero": zero, "folder": str(tmp_path_factory.mktemp(f"adapter{zero}"))})
        calls[f"freeze {zero}"] = ("freeze_and_update", {"zero": zero})
    return on_ranks(2, calls, "models_work.py")


def assert_same_gradient(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert set(result["gradient"]) == set(expected["gradient"])
    for name, gradient in expected["gradient"].items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        error = float((result["gradient"][name] - gradient).abs().max()) / scale
        assert error < tolerance, (name, error)
    assert result["norm"] == pytest.approx(expected["norm"], rel=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", STAGES)
def test_an_adapters_gradient_is_that_of_one_rank(one_rank: dict[str, Any], gradients: dict[str, Any], zero: int, dtype: str) -> None:
    """After a pass with the adapter off, which is the bare model to the last bit; float32 adapters whatever the base is."""
    for result in gradients[f"gradient {zero} {dtype}"]:
        assert_same_gradient(result, one_rank[dtype], DTYPES[dtype])
        assert result["dtypes"] == ["torch.float32"]
        assert result["base is the reference"] == 0.0 and result["adapter matters"] > 1e-3
        assert result["merged is the policy"] < (1e-4 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("zero", [0, 3])
def test_activations_computed_again_give_the_same_gradient(one_rank: dict[str, Any], gradients: dict[str, Any], zero: int) -> None:
    for result in gradients[f"checkpointing {zero}"]:
        assert_same_gradient(result, one_rank["float32"], DTYPES["float32"])


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("zero", STAGES)
def test_mean_and_reference_follow_and_are_in_checkpoints(two_ranks: dict[str, Any], zero: int, lora: bool) -> None:
    first, second = two_ranks[f"follow {zero} {lora}"]
    plain = two_ranks[f"follow 0 {lora}"][0]
    for result in (first, second):
        assert result["equal"] == {"live": True, "ema": True, "reference": True}
        assert result["mean"] < 1e-6 and result["mean moved"]
        assert result["untouched"] and result["mixed"] < 1e-6
    for what in ("weights", "ema"):
        for name, tensor in plain[what].items():
            assert torch.equal(first[what][name], second[what][name]), name
            assert torch.allclose(first[what][name], tensor, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("zero", STAGES)
def test_going_on_from_an_adapter(two_ranks: dict[str, Any], zero: int) -> None:
    for result in two_ranks[f"go on {zero}"]:
        assert all(result.values()), result


@pytest.mark.parametrize("zero", STAGES)
def test_frozen_weights_stay(two_ranks: dict[str, Any], zero: int) -> None:
    for result in two_ranks[f"freeze {zero}"]:
        frozen = [name for name in result["names"] if name.startswith(("model.embed_tokens.", "model.layers.0."))]
        assert result["moved"] == sorted(set(result["names"]) - set(frozen)) and frozen
        assert result["counts"][0] == len(frozen)
