"""Statistics of plain numbers: intervals, pass@k, moments that merge. No torch.

What it leaves out: anything over tokens (`reduce`) and anything a gradient flows through.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Z_95 = 1.96
"""Half width of a 95% interval, in standard errors."""


class Interval(NamedTuple):
    """A mean and its 95% interval. The bounds are NaN where one value says nothing about the spread."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of one value per prompt with its 95% interval, prompts as units.

    Wilson's interval when every value is 0 or 1, else mean +- 1.96 s / sqrt(n) with the sample deviation s (n - 1).

    >>> [round(x, 6) for x in mean_interval([1, 1, 0, 1])]
    [0.75, 0.300636, 0.954414]
    """
    assert len(values) > 0, "the mean of no values"
    if all(value in (0, 1) for value in values):
        return _wilson(sum(map(int, values)), len(values))
    moments = Moments.of(values)
    if moments.count == 1:
        return Interval(moments.mean, math.nan, math.nan)
    half = Z_95 * moments.sample_std / math.sqrt(moments.count)
    return Interval(moments.mean, moments.mean - half, moments.mean + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k completions, drawn without replacement from n of which c are right, is right (arXiv:2107.03374).

    >>> pass_at_k(5, 1, 2)
    0.4
    """
    assert 0 <= c <= n and 1 <= k <= n, f"need 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}"
    # one division of whole numbers: exact to the last bit, however large the binomials are
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and summed squared deviation of some numbers; two of them merge into those of all numbers together.

    >>> Moments.of([0.0, 1.0]).merge(Moments.of([1.0, 0.0])).population_std
    0.5
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Moments:
        """Moments of the values, by Welford's updates."""
        count, mean, squares = 0, 0.0, 0.0
        for value in values:
            count += 1
            delta = value - mean
            mean += delta / count
            squares += delta * (value - mean)
        return cls(count=count, mean=mean, squares=squares)

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets of numbers together (Chan, Golub, LeVeque 1979)."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + delta * other.count / count,
            squares=self.squares + other.squares + delta * delta * self.count * other.count / count,
        )

    @property
    def population_std(self) -> float:
        """Divisor n; 0 for no numbers."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def sample_std(self) -> float:
        """Divisor n - 1; 0 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


def _wilson(right: int, n: int) -> Interval:
    """Wilson's score interval of `right` successes in n trials."""
    mean = right / n
    scale = 1 + Z_95**2 / n
    centre = (mean + Z_95**2 / (2 * n)) / scale
    half = Z_95 * math.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n * n)) / scale
    # in exact arithmetic the interval holds the mean and ends at 0 and 1; min and max take the last bit of rounding away
    return Interval(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))
