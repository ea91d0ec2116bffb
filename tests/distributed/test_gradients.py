"""The same gradient for any sharding, packing, accumulation and ZeRO stage, to 1e-5 in float32."""

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


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """One rank, one micro-batch, padded, ZeRO 0, for every aggregation."""
    return {name: on_ranks(1, "gradient", layout="padded", micro=12, zero=0, aggregate=name)[0] for name in AGGREGATES}


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
def test_one_rank_many_micro_batches_and_packed(plain: dict[str, Any], aggregate: str) -> None:
    assert_same(on_ranks(1, "gradient", layout="packed", micro=5, zero=0, aggregate=aggregate)[0], plain[aggregate])


@pytest.mark.parametrize(
    ("layout", "zero", "uneven", "chunk_tokens"),
    [
        ("padded", 0, True, 0),
        ("packed", 0, False, 0),
        ("padded", 1, False, 0),
        ("packed", 2, True, 0),
        ("padded", 2, False, 5),
        ("padded", 3, True, 5),
        ("packed", 3, False, 0),
    ],
)
def test_two_ranks_with_uneven_micro_batches(plain: dict[str, Any], layout: str, zero: int, uneven: bool, chunk_tokens: int) -> None:
    """Rank 0 and rank 1 with different numbers of rows, three and more micro-batches, the head in chunks that differ by rank."""
    results = on_ranks(2, "gradient", layout=layout, micro=3 if uneven else 4, zero=zero, uneven=uneven, chunk_tokens=chunk_tokens)
    for result in results:
        assert_same(result, plain["token_mean"])


def test_zero_stages_agree_after_several_updates() -> None:
    results = {zero: on_ranks(2, "several_updates", zero=zero, updates=4) for zero in (0, 1, 2, 3)}
    for zero, ranks in results.items():
        for name, tensor in results[0][0]["weights"].items():
            assert torch.equal(ranks[0]["weights"][name], ranks[1]["weights"][name]), (zero, name)
            assert torch.allclose(ranks[0]["weights"][name], tensor, rtol=1e-4, atol=1e-5), (zero, name)
        assert ranks[0]["norms"] == pytest.approx(results[0][0]["norms"], rel=1e-4)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_one_rank_not_finite_skips_on_all(zero: int) -> None:
    """The update is skipped by both ranks alike; weights, version and moments are as before; the next one is applied."""
    first, second = on_ranks(2, "not_finite", zero=zero)
    assert first == second
    assert [entry["applied"] for entry in first] == [True, False, True]
    assert [entry["version"] for entry in first] == [1, 1, 2]
    assert first[0]["weights"] == first[1]["weights"] != first[2]["weights"]
    assert all(torch.isfinite(torch.tensor(list(entry["weights"].values()))).all() for entry in first)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_loaded_learner_goes_on_bit_for_bit(zero: int, tmp_path: Path) -> None:
    for result in on_ranks(2, "save_and_load", zero=zero, folder=str(tmp_path)):
        assert result == {"equal": True, "versions": (3, 3)}


def test_collectives_have_the_same_bits_everywhere() -> None:
    results = on_ranks(3, "collectives")
    assert all(result == results[0] for result in results)
    assert results[0]["sum"][0] == 0.1 + 0.2 + 0.30000000000000004
    assert results[0]["max"] == [2.0, 0.0]
    assert results[0]["gather"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
