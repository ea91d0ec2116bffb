"""One metric over the steps of a run, exact or in bounded memory.

Leaves out names and events; `history` keeps one of these per metric.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable

KEPT_ENDS = 32
"""Points at either end that thinning never touches, so that means over the first and the last few steps stay exact."""


class Series:
    """Points (step, value) in order of step, one a step.

    `limit` bounds the points: beyond it neighbours in the middle are averaged in pairs, which keeps the shape of a curve of any length. Without
    it every point stays.
    """

    def __init__(self, limit: int | None = None) -> None:
        assert limit is None or limit >= 4 * KEPT_ENDS, f"a limit of {limit} leaves nothing to thin"
        self.limit = limit
        self.steps = array("q")
        self.values = array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def put(self, step: int, value: float) -> None:
        """Add a point, or replace the one of that step."""
        place = bisect_left(self.steps, step)
        if place < len(self.steps) and self.steps[place] == step:
            self.values[place] = value
            return
        self.steps.insert(place, step)
        self.values.insert(place, value)
        if self.limit is not None and len(self.steps) > self.limit:
            self._thin()

    def drop(self, step: int) -> None:
        """Forget the point of that step, if there is one."""
        place = bisect_left(self.steps, step)
        if place < len(self.steps) and self.steps[place] == step:
            del self.steps[place], self.values[place]

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    def mean_of_first(self, count: int) -> float | None:
        return _mean(self.values[:count])

    def mean_of_last(self, count: int) -> float | None:
        return _mean(self.values[-count:])

    def _thin(self) -> None:
        stop = len(self.steps) - KEPT_ENDS
        stop -= (stop - KEPT_ENDS) % 2
        pairs = range(KEPT_ENDS, stop, 2)
        means = array("d", [(self.values[i] + self.values[i + 1]) / 2 for i in pairs])
        later = array("q", [self.steps[i + 1] for i in pairs])
        self.values = self.values[:KEPT_ENDS] + means + self.values[stop:]
        self.steps = self.steps[:KEPT_ENDS] + later + self.steps[stop:]


def _mean(values: Iterable[float]) -> float | None:
    known = [v for v in values if math.isfinite(v)]
    return math.fsum(known) / len(known) if known else None
