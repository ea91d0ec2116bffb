"""Paired comparisons against closed forms and against all sign assignments written out."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.algo import paired as room
from rftcli.algo.paired import paired, permutation_test, sign_test


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(5, 0, 2 / 32), (0, 5, 2 / 32), (9, 1, 22 / 1024), (10, 5, 2 * 4944 / 32768), (3, 3, 1.0), (1, 0, 1.0), (0, 0, 1.0)],
)
def test_sign_test(better: int, worse: int, p: float) -> None:
    """2 x sum of binomials up to the smaller count, over 2^n: C(10,0) + C(10,1) = 11; sum to 5 of C(15,k) = 4944."""
    assert sign_test(better, worse) == pytest.approx(p, abs=1e-15)


def by_hand(differences: list[float]) -> float:
    observed = abs(sum(differences))
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in itertools.product((1, -1), repeat=len(differences))]
    return sum(abs(one) >= observed - 1e-9 for one in sums) / len(sums)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, -0.1, -0.2, 1.0, -1.0, 0.7]), min_size=1, max_size=9))
def test_permutation_test_counts_all_assignments(differences: list[float]) -> None:
    p, exact = permutation_test(differences)
    assert exact and p == pytest.approx(by_hand(differences), abs=1e-12)


def test_zero_or_one_gives_mcnemar() -> None:
    """20 prompts: 9 better, 1 worse. On +-1 the permutation test is the sign test."""
    first = [1] * 9 + [0] + [1] * 5 + [0] * 5
    second = [0] * 9 + [1] + [1] * 5 + [0] * 5
    found = paired(first, second)
    assert (found.pairs, found.better, found.worse, found.same) == (20, 9, 1, 10)
    assert (found.first, found.second, found.difference) == (0.7, 0.3, pytest.approx(0.4))
    assert found.sign_p == pytest.approx(22 / 1024) and found.permutation_p == pytest.approx(22 / 1024) and found.permutation_exact
    # differences: nine 1, one -1, ten 0; sample variance (10 - 20 x 0.16) / 19
    half = 1.96 * math.sqrt((10 - 20 * 0.16) / 19 / 20)
    assert (found.low, found.high) == (pytest.approx(0.4 - half), pytest.approx(0.4 + half))


def test_the_order_of_the_two_turns_the_sign_only() -> None:
    a, b = [0.1, 0.9, 0.4, 0.4], [0.3, 0.2, 0.4, 0.1]
    one, other = paired(a, b), paired(b, a)
    assert one.difference == pytest.approx(-other.difference) and (one.better, one.worse) == (other.worse, other.better)
    assert one.permutation_p == other.permutation_p and one.sign_p == other.sign_p


def test_many_pairs_are_drawn_by_key() -> None:
    differences = [1.0] * 30 + [-1.0] * 10
    p, exact = permutation_test(differences, seed=3)
    assert not exact and permutation_test(differences, seed=3) == (p, False)
    expected = sign_test(30, 10)  # equal sizes: the same test
    assert p == pytest.approx(expected, abs=4 * math.sqrt(expected / room.DRAWN) + 1 / room.DRAWN)
    assert permutation_test([1.0] * 40)[0] == 1 / (room.DRAWN + 1)  # never 0


def test_nothing_differs() -> None:
    found = paired([0.5, 1.0], [0.5, 1.0])
    assert (found.difference, found.sign_p, found.permutation_p, found.same) == (0.0, 1.0, 1.0, 2)
    assert paired([1.0], [0.0]).low is None
