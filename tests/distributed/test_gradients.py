"""The same gradient for any sharding, packing, accumulation and ZeRO stage, to 1e-5 in float32; and what else only real ranks can show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

TOLERANCE = 1e-5
AGGREGATES = ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
STAGES = [0, 1, 2, 3]
# layout, ZeRO stage, uneven shares (9 rows against 3), positions per head chunk (0: all at once)
SHARDED = [
    ("padded", 0, True, 0),
    ("packed", 0, False, 0),
    ("padded", 1, False, 0),
    ("packed", 2, True, 0),
    ("padded", 2, False, 5),
    ("padded", 3, True, 5),
    ("packed", 3, False, 0),
]


# layout, ZeRO stage, uneven shares, tokens of a micro-batch: fewer than the longest row, a few rows, all rows
BUDGETS = [("padded", 0, True, 16), ("packed", 1, False, 30), ("padded", 2, True, 60), ("packed", 2, False, 16), ("padded", 3, False, 40),
           ("packed", 3, True, 30), ("padded", 1, False, 1000)]  # fmt: skip


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    calls = {}
    for name in AGGREGATES:
        calls[f"plain {name}"] = ("gradient", {"layout": "padded", "micro": 12, "zero": 0, "aggregate": name})
        calls[f"packed {name}"] = ("gradient", {"layout": "packed", "micro": 5, "zero": 0, "aggregate": name})
    return {name: results[0] for name, results in on_ranks(1, calls).items()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    calls: dict[str, Any] = {"collectives": ("collectives", {})}
    for layout, zero, uneven, chunk in SHARDED:
        arguments = {"layout": layout, "micro": 3 if uneven else 4, "zero": zero, "uneven": uneven, "chunk_tokens": chunk}
        calls[f"gradient {layout} {zero} {uneven} {chunk}"] = ("gradient", arguments)
    for layout, zero, uneven, tokens in BUDGETS:
        calls[f"budget {layout} {zero} {uneven} {tokens}"] = ("gradient", {"layout": layout, "zero": zero, "uneven": uneven, "tokens": tokens})
    for zero in STAGES:
        calls[f"updates {zero}"] = ("several_updates", {"zero": zero, "updates": 4})
        calls[f"not finite {zero}"] = ("not_finite", {"zero": zero})
        calls[f"never finite {zero}"] = ("never_finite", {"zero": zero})
        calls[f"saved {zero}"] = ("save_and_load", {"zero": zero, "folder": str(tmp_path_factory.mktemp(f"zero{zero}"))})
    return on_ranks(2, calls)


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["tokens"] == expected["tokens"]
    for name, gradient in expected["gradient"].items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        error = float((result["gradient"][name] - gradient).abs().max()) / scale
        assert error < TOLERANCE, (name, error)
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_many_micro_batches_and_packing_change_nothing(one_rank: dict[str, Any], aggregate: str) -> None:
    assert_same(one_rank[f"packed {aggregate}"], one_rank[f"plain {aggregate}"])


def test_aggregations_differ_from_each_other(one_rank: dict[str, Any]) -> None:
    """The test above would pass if all of them were one."""
    losses = {round(one_rank[f"plain {name}"]["metrics"]["policy_loss"], 6) for name in AGGREGATES}
    assert len(losses) == len(AGGREGATES)


@pytest.mark.parametrize(("layout", "zero", "uneven", "chunk"), SHARDED)
def test_two_ranks_with_uneven_micro_batches(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], layout: str, zero: int, uneven: bool, chunk: int
) -> None:
    """Ranks with different numbers of rows and micro-batches, the head in chunks whose number differs by rank."""
    for result in two_ranks[f"gradient {layout} {zero} {uneven} {chunk}"]:
        assert_same(result, one_rank["plain token_mean"])


@pytest.mark.parametrize(("layout", "zero", "uneven", "tokens"), BUDGETS)
def test_micro_batches_cut_by_tokens(one_rank: dict[str, Any], two_ranks: dict[str, Any], layout: str, zero: int, uneven: bool, tokens: int) -> None:
    """The same gradient as by rows, with rows that alone are more than the budget."""
    for result in two_ranks[f"budget {layout} {zero} {uneven} {tokens}"]:
        assert_same(result, one_rank["plain token_mean"])


@pytest.mark.parametrize("zero", STAGES)
def test_zero_stages_agree_after_several_updates(two_ranks: dict[str, Any], zero: int) -> None:
    first, second = two_ranks[f"updates {zero}"]
    plain = two_ranks["updates 0"][0]
    for name, tensor in plain["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), name
        assert torch.allclose(first["weights"][name], tensor, rtol=1e-4, atol=1e-5), name
    assert first["norms"] == pytest.approx(plain["norms"], rel=1e-4)


@pytest.mark.parametrize("zero", STAGES)
def test_one_rank_not_finite_skips_on_all(two_ranks: dict[str, Any], zero: int) -> None:
    """The update is skipped by both ranks alike; weights, version and moments are as before; the next one is applied."""
    first, second = two_ranks[f"not finite {zero}"]
    assert first == second
    assert [entry["applied"] for entry in first] == [True, False, True]
    assert [entry["version"] for entry in first] == [1, 1, 2]
    assert first[0]["weights"] == first[1]["weights"] != first[2]["weights"]
    assert all(torch.isfinite(torch.tensor(list(entry["weights"].values()))).all() for entry in first)


@pytest.mark.parametrize("zero", STAGES)
def test_a_streak_of_them_stops_the_run_on_all(two_ranks: dict[str, Any], zero: int) -> None:
    first, second = two_ranks[f"never finite {zero}"]
    assert first == second and first[0] == 2 and "3 updates in a row" in first[1] and "skip_at_most is 2" in first[1]


@pytest.mark.parametrize("zero", STAGES)
def test_a_loaded_learner_goes_on_bit_for_bit(two_ranks: dict[str, Any], zero: int) -> None:
    for result in two_ranks[f"saved {zero}"]:
        assert result == {"equal": True, "later": True, "versions": (3, 3)}


def test_collectives_have_the_same_bits_everywhere(two_ranks: dict[str, Any]) -> None:
    results = two_ranks["collectives"]
    assert results[0] == results[1]
    assert results[0]["sum"] == [0.1 + 0.2, 2.0]
    assert results[0]["max"] == [1.0, 0.0]
    assert results[0]["gather"] == [{"rank": 0}, {"rank": 1}]
