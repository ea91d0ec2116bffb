"""Learning rates in closed form."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.schedules import SCHEDULES, learning_rate

KINDS = sorted(SCHEDULES)


def rates(kind: str, indices: range, *, minimum: float = 0.0, warmup: int = 0, horizon: int = 10) -> list[float]:
    return [learning_rate(index, kind=kind, peak=1.0, minimum=minimum, warmup=warmup, horizon=horizon) for index in indices]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up(kind: str) -> None:
    assert rates(kind, range(5), warmup=4, minimum=0.5) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant() -> None:
    assert rates("constant", range(20), minimum=0.5) == [1.0] * 20
    assert learning_rate(3, kind="constant", peak=1e-6, minimum=3e-7, warmup=0, horizon=10) == 1e-6


def test_linear() -> None:
    assert rates("linear", range(0, 12, 2), warmup=2, minimum=0.2) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates("linear", range(10, 15)) == [0.0] * 5


def test_cosine() -> None:
    assert rates("cosine", range(0, 12), minimum=0.2)[:11] == pytest.approx([0.2 + 0.4 * (1 + math.cos(math.pi * i / 10)) for i in range(11)])
    assert rates("cosine", range(10, 13), minimum=0.2) == pytest.approx([0.2] * 3)
    assert rates("cosine", range(6, 7), warmup=2) == pytest.approx([0.5])


@pytest.mark.parametrize(("kind", "after"), [("constant", 1.0), ("linear", 0.1), ("cosine", 0.1)])
def test_a_horizon_within_the_warm_up(kind: str, after: float) -> None:
    assert rates(kind, range(6), warmup=4, horizon=2, minimum=0.1) == pytest.approx([0.25, 0.5, 0.75, 1.0, after, after])


@given(st.sampled_from(KINDS), st.integers(0, 20), st.integers(1, 50), st.floats(0.0, 1.0))
def test_falls_after_the_warm_up_and_stays_within_bounds(kind: str, warmup: int, horizon: int, minimum: float) -> None:
    values = rates(kind, range(60), warmup=warmup, horizon=warmup + horizon, minimum=minimum)
    assert all(0 < value <= 1 for value in values[:warmup])
    assert all(later <= earlier + 1e-15 for earlier, later in zip(values[warmup:-1], values[warmup + 1 :], strict=True))
    assert all(minimum - 1e-12 <= value <= 1 for value in values[warmup:])
    assert values[warmup] == 1.0


@given(st.sampled_from(KINDS))
def test_shares_start_at_the_peak(kind: str) -> None:
    assert SCHEDULES[kind].share(0.0) == 1.0
    assert SCHEDULES[kind].share(1.0) in (0.0, 1.0)
