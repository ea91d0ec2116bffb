"""Policy losses that treat a few tokens of the update apart: those whose log-prob varies with the advantage (arXiv:2505.22617).

cov = (A - mean A)(old - mean old), means over the N trained tokens of the update on all ranks. With the log-probs at rollout time in the place of the
current ones the choice does not depend on micro-batches, and it is made before the first of them.

What it leaves out: adding up and choosing over ranks (the stage does, with what stands here).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rftcli.algo.kl import log_ratio
from rftcli.algo.loss_terms import LossTerms
from rftcli.algo.token_losses import ppo_clip


def clip_cov(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    chosen: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossTerms:
    """ppo_clip; the `chosen` (N,) tokens have no policy term. They stay in the denominator, and are not counted as clipped."""
    terms = ppo_clip(new, old, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    assert terms.clipped_low is not None and terms.clipped_high is not None
    return LossTerms(
        loss=terms.loss.masked_fill(chosen, 0.0),
        clipped_low=terms.clipped_low & ~chosen,
        clipped_high=terms.clipped_high & ~chosen,
        ratio=terms.ratio,
    )


def kl_cov(new: Tensor, old: Tensor, advantages: Tensor, *, chosen: Tensor, beta: float) -> LossTerms:
    """-A rho, unclipped; the `chosen` (N,) tokens add beta |new - old|."""
    assert beta >= 0, beta
    difference = log_ratio(new, old.detach())
    ratio = difference.exp()
    loss = -advantages.detach() * ratio
    return LossTerms(loss=torch.where(chosen, loss + beta * difference.abs(), loss), ratio=ratio.detach())


def covariances(advantages: Tensor, old: Tensor, *, mean_advantage: float, mean_old: float) -> Tensor:
    """(N,) float64 cov of each token."""
    return (advantages.double() - mean_advantage) * (old.double() - mean_old)


def how_many(share: float, tokens: int) -> int:
    """max(1, floor(share N)); nothing is lost where share N is a whole number that the product misses by its last bit.

    >>> how_many(2e-4, 100), how_many(2e-4, 10000), how_many(0.07, 100)
    (1, 2, 7)
    """
    return max(1, math.floor(share * tokens + 1e-9))
