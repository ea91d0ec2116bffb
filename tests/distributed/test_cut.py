"""A model that no device holds whole is cut in the machine's memory before DeepSpeed wraps it: the same learner, and the same proof."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient": ("gradient", {}),
    "bfloat16": ("updates", {"dtype": "bfloat16"}),
    "offloaded": ("updates", {"offload_optimizer": "cpu", "offload_parameters": "cpu"}),
    "lora": ("lora", {}),
    "proof": ("proof", {}),
    "reference": ("reference", {}),
}


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    calls = {f"{name} {host}": (function, {**how, "from_host": host}) for name, (function, how) in CASES.items() for host in (True, False)}
    return on_ranks(2, {**calls, "truth": ("one_truth", {})}, "cut_work.py")


def same(found: Any, expected: Any, path: str = "") -> None:
    """Bit for bit."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for name, value in expected.items():
            same(found[name], value, f"{path}.{name}")
    elif isinstance(expected, list):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{path}[{number}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), path
    else:
        assert found == expected, path


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_same_as_of_a_model_that_was_whole(told: dict[str, list[Any]], name: str) -> None:
    for rank in range(2):
        found, expected = told[f"{name} True"][rank], told[f"{name} False"][rank]
        if name == "reference":
            assert expected.pop("whole") and not found.pop("whole")
        same(found, expected)


def test_the_proof_is_one(told: dict[str, list[Any]]) -> None:
    for found in told["proof True"]:
        assert found["head"] == "chunked" and found["layouts"] == ("padded", "packed")
        assert 0 < found["worst"] < 1e-5
        assert found["held"] == 0  # no tensor is whole on any rank
        assert found["norm"] > 0


def test_rank_0_has_the_truth(told: dict[str, list[Any]]) -> None:
    (first, trained), (second, other) = told["truth"]
    assert first != second and trained == other == pytest.approx(first, rel=1e-12)
