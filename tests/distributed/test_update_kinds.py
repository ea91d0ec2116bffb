"""Every way to make an update on two real ranks: it takes a step, skips one that is not finite, and goes on from a checkpoint bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

OVERLAPPED = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000}}
PURE = {"master": "bfloat16", "gradients": "bfloat16", "reduce": "bfloat16"}
# name -> what `work.learner_of` takes
KINDS: dict[str, dict[str, Any]] = {
    **{f"8 bit {zero}": {"kind": "adamw_8bit", "zero": zero, "weight_decay": 0.1} for zero in (0, 1, 2, 3)},  # bitsandbytes has a slow path for CPUs
    "8 bit bfloat16": {"kind": "adamw_8bit", "zero": 2, "dtype": "bfloat16"},
    "muon 0": {"kind": "muon", "zero": 0, "weight_decay": 0.1},
    **{f"decay {zero}": {"zero": zero, "weight_decay": 0.1, "no_decay": ["*norm*", "*embed*"]} for zero in (0, 2, 3)},
    **{f"offload {zero}": {"zero": zero, "offload_optimizer": "cpu"} for zero in (1, 2, 3)},
    "offload parameters": {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "extra": {"zero": 2, "extra": OVERLAPPED},
    **{f"bfloat16 {zero}": {"zero": zero, "dtype": "bfloat16"} for zero in (1, 2, 3)},
    **{f"bfloat16 offload {zero}": {"zero": zero, "dtype": "bfloat16", "offload_optimizer": "cpu"} for zero in (1, 2, 3)},
    "bfloat16 reduce": {"zero": 2, "dtype": "bfloat16", "reduce": "bfloat16"},
    "bfloat16 gradients": {"zero": 2, "dtype": "bfloat16", "gradients": "bfloat16"},
    **{f"pure bfloat16 {zero}": {"zero": zero, "dtype": "bfloat16", **PURE} for zero in (1, 2, 3)},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for name, how in KINDS.items():
        calls[f"skip {name}"] = ("not_finite", how)
        calls[f"saved {name}"] = ("save_and_load", {**how, "folder": str(tmp_path_factory.mktemp("saved"))})
    for name in ("extra", *(name for name in KINDS if "offload " in name), *(f"bfloat16 {zero}" for zero in (1, 2, 3))):
        calls[f"updates {name}"] = ("several_updates", {**KINDS[name], "updates": 3})
    calls["updates plain"] = ("several_updates", {"zero": 0, "updates": 3})
    return on_ranks(2, calls)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_and_a_skip(results: dict[str, Any], name: str) -> None:
    """The first update moves the weights, the second is not finite on one rank and changes nothing on either, the third is applied."""
    first, second = results[f"skip {name}"]
    assert first == second
    assert [entry["applied"] for entry in first] == [True, False, True]
    assert [entry["version"] for entry in first] == [1, 1, 2]
    assert first[0]["weights"] == first[1]["weights"] != first[2]["weights"]
    assert all(torch.isfinite(torch.tensor(list(entry["weights"].values()))).all() for entry in first)


@pytest.mark.parametrize("name", KINDS)
def test_resumed_bit_for_bit(results: dict[str, Any], name: str) -> None:
    for result in results[f"saved {name}"]:
        assert result == {"equal": True, "later": True, "versions": (3, 3)}


@pytest.mark.parametrize("name", ["offload 1", "offload 2", "offload 3", "offload parameters", "extra"])
def test_where_things_lie_changes_no_update(results: dict[str, Any], name: str) -> None:
    plain = results["updates plain"][0]
    for found in results[f"updates {name}"]:
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-4)
        for key, tensor in plain["weights"].items():
            assert torch.allclose(found["weights"][key], tensor, rtol=1e-4, atol=1e-5), key


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_offloaded_optimizer_gets_the_same_sums_of_gradients(results: dict[str, Any], zero: int) -> None:
    """Several micro-batches of a policy in bfloat16 are summed in float32 there too."""
    here, away = results[f"updates bfloat16 {zero}"][0], results[f"updates bfloat16 offload {zero}"][0]
    assert away["norms"] == pytest.approx(here["norms"], rel=1e-6)  # sums in bfloat16 are 5e-5 off
    assert sum(int((away["weights"][key] != tensor).sum()) for key, tensor in here["weights"].items()) <= 10  # of thousands, by a last place
