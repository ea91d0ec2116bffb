"""Two policies on the same prompts: the mean difference with its interval, and exact tests of "no difference". No torch, no scipy.

A pair is one prompt: the mean reward of its completions under either policy. It leaves out where the numbers come from and how they are told.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rftcli.algo.keyed import key64
from rftcli.algo.stats import Z_95, Moments

EXACT_PAIRS = 32
"""Up to so many differing pairs all sign assignments are counted (two halves of 2^16); beyond, they are drawn."""
DRAWN = 9999
"""Sign assignments drawn where there are too many to count."""
_EQUAL = 1e-9
"""Sums nearer than this, relative to the largest possible one, are equal: the same differences added in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """First policy against second, prompt by prompt."""

    pairs: int
    first: float
    second: float
    """Mean over prompts of either."""
    difference: float
    """first - second"""
    low: float | None
    high: float | None
    """95% interval of the difference; None for a single pair."""
    better: int
    worse: int
    same: int
    """Prompts on which the first does better, worse, the same."""
    sign_p: float
    """Exact two-sided sign test over the prompts that differ; McNemar's exact test where every value is 0 or 1."""
    permutation_p: float
    """Two-sided sign-flip permutation test of the mean difference."""
    permutation_exact: bool


def paired(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Paired:
    """Compare value by value.

    >>> found = paired([1, 1, 1, 0], [0, 0, 1, 0])
    >>> found.difference, found.better, found.worse, found.sign_p
    (0.5, 2, 0, 0.5)
    """
    assert len(first) == len(second) > 0, (len(first), len(second))
    differences = [float(a) - float(b) for a, b in zip(first, second, strict=True)]
    moments = Moments.of(differences)
    half = Z_95 * moments.sample_std / math.sqrt(moments.count)
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    p, exact = permutation_test(differences, seed=seed)
    return Paired(
        pairs=len(differences),
        first=math.fsum(first) / len(differences),
        second=math.fsum(second) / len(differences),
        difference=moments.mean,
        low=None if moments.count == 1 else moments.mean - half,
        high=None if moments.count == 1 else moments.mean + half,
        better=better,
        worse=worse,
        same=len(differences) - better - worse,
        sign_p=sign_test(better, worse),
        permutation_p=p,
        permutation_exact=exact,
    )


def sign_test(better: int, worse: int) -> float:
    """Two-sided p of `better` heads and `worse` tails from a fair coin: min(1, 2 P(X <= the smaller)). Exact. 1 where nothing differs.

    >>> sign_test(5, 0), sign_test(3, 3), sign_test(0, 0)
    (0.0625, 1.0, 1.0)
    """
    tosses = better + worse
    tail = sum(math.comb(tosses, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**tosses) if tosses else 1.0


def permutation_test(differences: Sequence[float], *, seed: int = 0) -> tuple[float, bool]:
    """(two-sided p, exact): the share of all sign assignments whose sum is at least as far from 0 as the one observed.

    Exact for up to `EXACT_PAIRS` differences that are not 0: sums of two halves, met in the middle. Beyond, `DRAWN` assignments keyed by `seed`,
    counting the observed one among them (so p is never 0).

    >>> permutation_test([1.0, 1.0, 1.0])
    (0.25, True)
    """
    sizes = [abs(d) for d in differences if d != 0]
    if not sizes:
        return 1.0, True
    observed = abs(math.fsum(differences)) - _EQUAL * math.fsum(sizes)
    if observed <= 0:
        return 1.0, True
    if len(sizes) <= EXACT_PAIRS:
        middle = len(sizes) // 2
        left, right = _sums(sizes[:middle]), sorted(_sums(sizes[middle:]))
        beyond = sum(len(right) - bisect_left(right, observed - one) + bisect_right(right, -observed - one) for one in left)
        return beyond / 2 ** len(sizes), True
    beyond = sum(abs(_flipped(sizes, seed, draw)) >= observed for draw in range(DRAWN))
    return (beyond + 1) / (DRAWN + 1), False


def _sums(sizes: Sequence[float]) -> list[float]:
    """All 2^n signed sums."""
    sums = [0.0]
    for size in sizes:
        sums = [one + sign * size for one in sums for sign in (1, -1)]
    return sums


def _flipped(sizes: Sequence[float], seed: int, draw: int) -> float:
    """The sum under one keyed assignment of signs."""
    total = 0.0
    for start in range(0, len(sizes), 64):
        bits = key64("sign-flip", seed, draw, start)
        for offset, size in enumerate(sizes[start : start + 64]):
            total += size if bits >> offset & 1 else -size
    return total
