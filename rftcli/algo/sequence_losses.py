"""Policy losses that read the ratio of a whole sequence. A sequence lies whole in one micro-batch, so no other rank is asked.

`sequence` (N,) says which of `num_sequences` sequences a trained token belongs to; sums and means are over its trained tokens alone.

What it leaves out: aggregation (`reduce`); a loss with one term a sequence repeats it at its tokens, for `sequence_mean` to add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rftcli.algo.kl import LOG_RATIO_BOUND, log_ratio
from rftcli.algo.loss_terms import LossTerms, per_sequence, sequence_means
from rftcli.algo.token_losses import clipped


def rloo_sequence(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    sequence: Tensor,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossTerms:
    """ppo_clip of the ratio of the whole sequence, exp of the summed differences within +-20; one term a sequence (arXiv:2402.14740).

    The product grows with the length: at 512 tokens a mean difference of 0.001 is a ratio of 1.67.
    """
    total = per_sequence(new - old.detach(), sequence, num_sequences).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return clipped(total.exp()[sequence], advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gspo(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    sequence: Tensor,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossTerms:
    """ppo_clip of sg(s) exp(new - sg(new)), s = exp(mean of new - old over the sequence) (arXiv:2507.18071).

    The token form: its value is s, its gradient s at each token, and a token may have an advantage of its own.
    """
    mean = sequence_means(new.detach() - old.detach(), sequence, num_sequences).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = mean.exp()[sequence] * (new - new.detach()).exp()
    return clipped(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gmpo(
    new: Tensor, old: Tensor, advantages: Tensor, *, sequence: Tensor, num_sequences: int, clip_low: float, clip_high: float
) -> LossTerms:
    """-A exp(mean of d over the sequence), d = min(new - old, clip_high) for A > 0, max(new - old, -clip_low) for A < 0; one term a sequence
    (arXiv:2507.20673). The bounds are in log space."""
    assert clip_low >= 0 and clip_high >= 0, (clip_low, clip_high)
    advantages = advantages.detach()
    difference = log_ratio(new, old.detach())
    clipped_high = (advantages > 0) & (difference > clip_high)
    clipped_low = (advantages < 0) & (difference < -clip_low)
    bounded = torch.where(clipped_high, clip_high, torch.where(clipped_low, -clip_low, difference))
    ratio = sequence_means(bounded, sequence, num_sequences).exp()[sequence]
    return LossTerms(loss=-advantages * ratio, clipped_low=clipped_low, clipped_high=clipped_high, ratio=ratio.detach())
