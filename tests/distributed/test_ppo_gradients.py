"""Critic, supervised stream and router: the same gradient for any sharding, packing, accumulation and ZeRO stage; saved and loaded bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

TOLERANCE = 1e-5
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "critic": ("critic_gradient", {}),
    "answers": ("policy_gradient", {"rows": 5}),
    "router": ("policy_gradient", {"router": 0.5}),
}
# layout, ZeRO stage, uneven shares (9 rows against 3)
SHARDED = [("padded", 0, True), ("packed", 1, False), ("padded", 2, False), ("packed", 3, True)]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    calls = {}
    for kind, (function, arguments) in KINDS.items():
        calls[f"{kind} plain"] = (function, {"layout": "padded", "micro": 12, "zero": 0, **arguments})
        calls[f"{kind} packed"] = (function, {"layout": "packed", "micro": 5, "zero": 0, **arguments})
    calls["bare"] = ("policy_gradient", {"layout": "padded", "micro": 12, "zero": 0})
    calls["unbalanced"] = ("policy_gradient", {"layout": "padded", "micro": 12, "zero": 0, "router": 1e-9})
    return {name: results[0] for name, results in on_ranks(1, calls).items()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for kind, (function, arguments) in KINDS.items():
        for layout, zero, uneven in SHARDED:
            calls[f"{kind} {layout} {zero} {uneven}"] = (function, {"layout": layout, "micro": 3, "zero": zero, "uneven": uneven, **arguments})
    for zero in (0, 2, 3):
        calls[f"saved {zero}"] = ("save_and_load_both", {"zero": zero, "folder": str(tmp_path_factory.mktemp(f"both{zero}"))})
    return on_ranks(2, calls)


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["tokens"] == expected["tokens"]
    largest = max(float(gradient.abs().max()) for gradient in expected["gradient"].values())
    for name, gradient in expected["gradient"].items():
        scale = max(float(gradient.abs().max()), 1e-2 * largest)  # a bias that cancels itself has rounding noise for a gradient
        assert float((result["gradient"][name] - gradient).abs().max()) / scale < TOLERANCE, name
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_many_micro_batches_and_packing_change_nothing(one_rank: dict[str, Any], kind: str) -> None:
    assert_same(one_rank[f"{kind} packed"], one_rank[f"{kind} plain"])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("layout", "zero", "uneven"), SHARDED)
def test_two_ranks_with_uneven_micro_batches(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], kind: str, layout: str, zero: int, uneven: bool
) -> None:
    for result in two_ranks[f"{kind} {layout} {zero} {uneven}"]:
        assert_same(result, one_rank[f"{kind} plain"])


def test_what_is_beside_the_policy_is_felt(one_rank: dict[str, Any]) -> None:
    """The tests above would pass if nothing were added."""
    assert one_rank["answers plain"]["norm"] != pytest.approx(one_rank["bare"]["norm"], rel=1e-3)
    assert one_rank["answers plain"]["metrics"]["ptx_loss"] > 0 and "ptx_loss" not in one_rank["bare"]["metrics"]
    balanced, unbalanced = one_rank["router plain"], one_rank["unbalanced"]
    gate = next(name for name in balanced["gradient"] if "gate.weight" in name)
    assert not torch.allclose(balanced["gradient"][gate], unbalanced["gradient"][gate], rtol=0.1)
    assert balanced["metrics"]["router_loss"] >= 1.0 and "router_loss" not in one_rank["bare"]["metrics"]


def test_values_land_at_their_own_tokens_on_any_rank(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    expected = {tuple(ids): values for ids, values in one_rank["critic plain"]["values"]}
    for layout, zero, uneven in SHARDED:
        found = [entry for result in two_ranks[f"critic {layout} {zero} {uneven}"] for entry in result["values"]]
        assert len(found) == len(expected)
        for ids, values in found:
            assert values == pytest.approx(expected[tuple(ids)], abs=1e-5)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_both_learners_go_on_bit_for_bit(two_ranks: dict[str, Any], zero: int) -> None:
    for result in two_ranks[f"saved {zero}"]:
        assert result == {"equal": True, "moved": True, "versions": (3, 3)}
