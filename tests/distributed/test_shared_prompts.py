"""Prompts that stand once for their group change no gradient, value or log-prob, to 1e-5 in float32: over ranks, ZeRO stages, cuts and models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

TOLERANCE = 1e-5
PLAIN = {"layout": "padded", "shares": False, "micro": 12, "zero": 0}
# attention, ZeRO stage, how micro-batches are cut: by rows that do and do not divide a group, by tokens for a group and for less than one
SHARED = [("sdpa", 0, {"micro": 3}), ("rft_varlen", 1, {"micro": 2}), ("rft_varlen", 2, {"tokens": 40}), ("eager", 3, {"tokens": 14})]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    calls = {name: (name, PLAIN) for name in ("critic", "before")}
    calls |= {"policy": ("gradient", PLAIN), "experts": ("gradient", {**PLAIN, "experts": True})}
    return {name: results[0] for name, results in on_ranks(1, calls, "shared_work.py").items()}


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for attention, zero, cut in SHARED:
        calls[f"policy {attention} {zero}"] = ("gradient", {"layout": "packed", "shares": True, "zero": zero, "attention": attention, **cut})
    packed = {"layout": "packed", "shares": True, "tokens": 40}
    calls["experts"] = ("gradient", {**packed, "zero": 0, "attention": "rft_varlen", "experts": True})
    for zero in (0, 3):
        calls[f"critic {zero}"] = ("critic", {**packed, "zero": zero})
        calls[f"before {zero}"] = ("before", {**packed, "zero": zero})
    return on_ranks(2, calls, "shared_work.py")


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["tokens"] == expected["tokens"]
    for name, gradient in expected["gradient"].items():
        error = float((result["gradient"][name] - gradient).abs().max()) / float(gradient.abs().max())
        assert error < TOLERANCE, (name, error)
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5)


@pytest.mark.parametrize(("attention", "zero", "cut"), SHARED)
def test_the_policys_gradient(plain: dict[str, Any], shared: dict[str, Any], attention: str, zero: int, cut: dict[str, int]) -> None:
    for result in shared[f"policy {attention} {zero}"]:
        assert_same(result, plain["policy"])


def test_a_mixture_of_experts(plain: dict[str, Any], shared: dict[str, Any]) -> None:
    """Experts are chosen token by token, so a prompt that stands once is routed as each of its copies was."""
    for result in shared["experts"]:
        assert_same(result, plain["experts"])


@pytest.mark.parametrize("zero", [0, 3])
def test_a_critic(plain: dict[str, Any], shared: dict[str, Any], zero: int) -> None:
    for result in shared[f"critic {zero}"]:
        assert_same(result, plain["critic"])


@pytest.mark.parametrize("zero", [0, 3])
def test_values_behind_every_token_and_the_last(plain: dict[str, Any], shared: dict[str, Any], zero: int) -> None:
    found = [sorted(result["values"]) for result in shared[f"critic {zero}"]]
    assert sorted(found[0] + found[1]) == pytest.approx(sorted(plain["critic"]["values"]), abs=1e-5)


@pytest.mark.parametrize("zero", [0, 3])
def test_log_probs_and_entropies_without_a_gradient(plain: dict[str, Any], shared: dict[str, Any], zero: int) -> None:
    found = [item for result in shared[f"before {zero}"] for item in result]
    assert len(found) == len(plain["before"]) == 12
    for (logprobs, entropies), (expected, expected_entropies) in zip(found, plain["before"], strict=True):
        assert logprobs == pytest.approx(expected, abs=1e-5) and entropies == pytest.approx(expected_entropies, abs=1e-5)
