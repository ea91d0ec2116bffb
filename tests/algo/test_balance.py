"""Shares of work: whole, even, and no more travelling than they are worth."""

from __future__ import annotations

import doctest
import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.algo import balance
from rftcli.algo.balance import TOLERANCE, fair_shares, fullest, loads


def test_examples() -> None:
    assert doctest.testmod(balance).failed == 0


work = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks), st.lists(st.tuples(st.integers(0, 5000).map(float), st.integers(0, ranks - 1)), max_size=40)
    )
)  # fmt: skip


@given(work)
@settings(max_examples=300, deadline=None)
def test_never_worse_and_within_grahams_bound(drawn: tuple[int, list[tuple[float, int]]]) -> None:
    ranks, items = drawn
    costs, homes = [cost for cost, _ in items], [home for _, home in items]
    places = fair_shares(costs, homes, ranks)
    before, after = fullest(costs, homes, ranks), fullest(costs, places, ranks)
    least = max(sum(costs) / ranks, max(costs, default=0.0))
    assert len(places) == len(items) and all(0 <= place < ranks for place in places)
    assert sum(loads(costs, places, ranks)) == sum(costs)
    assert after <= before and set(homes) <= set(places)  # a rank with nothing at all could not take part
    assert all(place == home for cost, place, home in zip(costs, places, homes, strict=True) if cost == 0)
    assert places == homes or after < before
    assert after <= max((1 + TOLERANCE) * least, (2 - 1 / ranks) * least + 1e-6)  # least work is at most the best division's
    assert fair_shares(costs, homes, ranks) == places


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
@settings(max_examples=100, deadline=None)
def test_against_every_division(costs: list[int], ranks: int) -> None:
    best = min(fullest(costs, places, ranks) for places in product(range(ranks), repeat=len(costs)))
    found = fullest(costs, fair_shares([float(cost) for cost in costs], [0] * len(costs), ranks), ranks)
    assert found <= max((4 / 3 - 1 / (3 * ranks)) * best, (1 + TOLERANCE) * max(sum(costs) / ranks, max(costs)))


def test_even_ranks_stay_as_they_are() -> None:
    assert fair_shares([100, 101, 100, 99], [1, 1, 0, 0], 2) == [1, 1, 0, 0]
    assert fair_shares([], [], 3) == []
    assert fair_shares([0, 0, 0], [2, 2, 2], 3) == [2, 2, 2]


def test_what_is_there_already_stays() -> None:
    """Rank 2 keeps its long one, and only what has to go goes."""
    costs, homes = [9.0, 1, 1, 8, 4, 4], [2, 2, 2, 1, 1, 0]
    places = fair_shares(costs, homes, 3)
    assert loads(costs, places, 3) == [9.0, 9.0, 9.0]
    assert places[0] == 2 and places[3] == 1 and places[5] == 0


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_many_ranks(ranks: int) -> None:
    """16 answers a rank of very unlike lengths: fuller than even by little, and soon."""
    draws = random.Random(ranks)
    costs = [round(draws.lognormvariate(6, 0.8)) for _ in range(16 * ranks)]
    homes = [index // 16 for index in range(16 * ranks)]
    even = sum(costs) / ranks
    assert fullest(costs, homes, ranks) > 1.15 * even
    assert fullest(costs, fair_shares(costs, homes, ranks), ranks) < 1.02 * max(even, max(costs))
