"""Intervals, pass@k and moments against closed forms."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.stats import Moments, mean_interval, pass_at_k

VALUES = st.lists(st.floats(-1e3, 1e3), max_size=30)


def test_wilson() -> None:
    assert mean_interval([1, 0, 1, 1]) == pytest.approx((0.75, 0.300636, 0.954414), abs=5e-7)
    none, every = mean_interval([0.0] * 10), mean_interval([True] * 10)
    z2 = 1.96**2
    assert none == pytest.approx((0.0, 0.0, z2 / (10 + z2)))
    assert every == pytest.approx((1.0, 10 / (10 + z2), 1.0))
    assert none.low == 0.0 and every.high == 1.0
    assert mean_interval([1.0]) == pytest.approx((1.0, 1 / (1 + z2), 1.0))


def test_interval_of_shares() -> None:
    assert mean_interval([0.25, 0.5, 0.75, 0.5]) == pytest.approx((0.5, 0.5 - 1.96 * math.sqrt(0.125 / 3) / 2, 0.5 + 1.96 * math.sqrt(0.125 / 3) / 2))
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5, 0.5)
    single = mean_interval([0.5])
    assert single.mean == 0.5 and math.isnan(single.low) and math.isnan(single.high)


def test_no_values_are_refused() -> None:
    with pytest.raises(AssertionError):
        mean_interval([])


@given(st.integers(1, 60), st.integers(0, 60))
def test_wilson_holds_its_mean_and_stays_a_probability(n: int, right: int) -> None:
    right = min(n, right)
    interval = mean_interval([1] * right + [0] * (n - right))
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [(5, 1, 5, 1.0), (5, 1, 2, 0.4), (5, 2, 3, 0.9), (8, 3, 1, 0.375), (8, 3, 4, 13 / 14), (8, 0, 4, 0.0), (1, 1, 1, 1.0)],
)
def test_pass_at_k(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-15)


@given(st.integers(1, 7), st.integers(0, 7), st.integers(1, 7))
def test_pass_at_k_counts_subsets(n: int, c: int, k: int) -> None:
    c, k = min(c, n), min(k, n)
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


def test_pass_at_k_beyond_the_range_of_floats() -> None:
    assert pass_at_k(4000, 1, 1000) == pytest.approx(0.25, abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_pass_at_k_refuses(n: int, c: int, k: int) -> None:
    with pytest.raises(AssertionError):
        pass_at_k(n, c, k)


def test_moments_of_rewards() -> None:
    moments = Moments.of([0.0, 1.0, 1.0, 0.0])
    assert (moments.mean, moments.population_std) == (0.5, 0.5)
    assert moments.sample_std == pytest.approx(math.sqrt(1 / 3))
    evaluated = moments.merge(Moments.of([10.0] * 4))
    assert (evaluated.mean, evaluated.population_std) == pytest.approx((5.25, 4.763140), abs=5e-7)
    assert (moments.mean, moments.population_std) == (0.5, 0.5)  # a merge makes new moments, it changes none
    assert Moments.of([1.0, 0.0, 0.0, 0.0]).sample_std == 0.5
    assert (Moments().population_std, Moments().sample_std, Moments.of([3.0]).sample_std) == (0.0, 0.0, 0.0)
    assert Moments().merge(Moments()) == Moments()


@given(VALUES, VALUES)
def test_moments_do_not_depend_on_the_split(left: list, right: list) -> None:
    merged, whole = Moments.of(left).merge(Moments.of(right)), Moments.of(left + right)
    assert merged.count == whole.count == len(left) + len(right)
    assert merged.mean == pytest.approx(whole.mean, abs=1e-9)
    assert merged.squares == pytest.approx(whole.squares, rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30))
def test_moments_agree_with_the_library(values: list) -> None:
    moments = Moments.of(values)
    assert moments.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert moments.population_std == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-6)
    assert moments.sample_std == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)
