"""The learning rate as a pure function of how many updates were applied. No state: a resumed or skipped update needs no bookkeeping.

What it leaves out: optimizers, and deciding the horizon.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One row of SCHEDULES."""

    share: Callable[[float], float]
    """Progress after the warm-up, 0..1 -> weight of the peak; the rest is the weight of the minimum."""
    summary: str


def learning_rate(update_index: int, *, kind: str, peak: float, minimum: float, warmup: int, horizon: int) -> float:
    """The rate of the update with this index: applied updates, counted from 0.

    During the `warmup` updates it rises as (index + 1) / warmup x peak, so no update is wasted on a rate of 0. Afterwards it falls from the peak
    (at index = warmup) to the minimum (from index = horizon on). A horizon that ends within the warm-up leaves no decay: the minimum follows.
    The minimum does not hold during the warm-up, and a constant rate never uses it.
    """
    assert update_index >= 0 and warmup >= 0, (update_index, warmup)
    if update_index < warmup:
        return (update_index + 1) / warmup * peak
    progress = min(1.0, (update_index - warmup) / (horizon - warmup)) if horizon > warmup else 1.0
    share = SCHEDULES[kind].share(progress)
    return share * peak + (1.0 - share) * minimum


def constant(progress: float) -> float:
    """The peak throughout."""
    return 1.0


def linear(progress: float) -> float:
    """A straight line."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine wave (arXiv:1608.03983, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


# How to add one: write a function from progress (0 at the end of the warm-up, 1 at the horizon) to the peak's weight (1 at 0, 0 at 1 if it
# decays), add a row under the name a recipe uses, and add the name to the recipe's Literal.
SCHEDULES: dict[str, Schedule] = {
    "constant": Schedule(share=constant, summary="warm-up, then the peak throughout"),
    "linear": Schedule(share=linear, summary="warm-up, then a straight line to the minimum"),
    "cosine": Schedule(share=cosine, summary="warm-up, then half a cosine wave to the minimum"),
}
