"""Policy losses, one function per loss, over the trained tokens of a micro-batch. Every loss is minimised.

Advantages, old, reference and sampler log-probs carry no gradient. Where a bound holds, its value is selected, never mixed in by multiplication.

What it leaves out: aggregation (`reduce`), the KL term (`kl`), and masks (tokens that are not trained on are not in the vectors).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rftcli.algo.kl import log_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What a loss says about each term: (N,) of unit "token", or (num_sequences,) of unit "sequence"."""

    loss: Tensor
    clipped_low: Tensor
    """bool: the lower bound holds the term back (so the advantage is negative)."""
    clipped_high: Tensor
    """bool: the upper bound holds the term back (so the advantage is positive)."""
    ratio: Tensor
    """New over old probability, without gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One row of LOSSES."""

    function: Callable[..., LossTerms]
    """(new (N,), old (N,), advantages (N,), *, options) -> LossTerms; of unit "sequence" also `sequence` (N,) and `num_sequences`."""
    unit: str
    """What one term belongs to: "token" or "sequence"."""
    options: tuple[str, ...]
    """Keyword arguments that a recipe may set."""
    source: str
    summary: str


def ppo_clip(
    new: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> LossTerms:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), rho = exp(new - old) (arXiv:1707.06347; two bounds arXiv:2503.14476).

    `dual_clip` c > 1: for A < 0 at most -c A (arXiv:1912.09729). It is not counted as clipped. For the first update on policy pass
    old = new.detach(): rho is exactly 1, and its gradient the score function's.
    """
    assert 0 <= clip_low <= 1 and clip_high >= 0 and (dual_clip is None or dual_clip > 1), (clip_low, clip_high, dual_clip)
    ratio = log_ratio(new, old.detach()).exp()  # (N,)
    advantages = advantages.detach()
    clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    loss = -advantages * ratio
    loss = torch.where(clipped_low, -advantages * (1 - clip_low), loss)
    loss = torch.where(clipped_high, -advantages * (1 + clip_high), loss)
    if dual_clip is not None:
        loss = torch.where((advantages < 0) & (ratio > dual_clip), -advantages * dual_clip, loss)
    return LossTerms(loss=loss, clipped_low=clipped_low, clipped_high=clipped_high, ratio=ratio.detach())


# How to add one: write a function with the signature in `Loss.function` whose ratios go through `log_ratio`, add a row under the name a recipe
# uses, and add the name and its options to the recipe.
LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(
        function=ppo_clip,
        unit="token",
        options=("clip_low", "clip_high", "dual_clip"),
        source="PPO, arXiv:1707.06347; two bounds DAPO, arXiv:2503.14476; dual clip arXiv:1912.09729",
        summary="the probability ratio times the advantage, clipped where it would go too far",
    ),
}
