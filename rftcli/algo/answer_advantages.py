"""Estimators that do not compare within a group: the reward itself, ReMax's greedy twin, a teacher's log-probs, values made elsewhere.

Computed in float64, returned in float32; no gradient. What it leaves out: estimators with a group baseline (`group_advantages`), credit per token
from rewards (`returns`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rftcli.algo.groups import checked, is_flat

LOG_RATIO_BOUND = 20.0
"""A teacher's log-prob is compared within this many nats."""


def reinforce(rewards: Tensor, *, baseline: str = "none") -> Tensor:
    """(C,) the reward itself. `baseline` "batch": minus the mean of all rewards of the step, exactly 0 where all are alike."""
    assert baseline in ("none", "batch"), baseline
    values = checked(rewards)
    if baseline == "none" or values.numel() == 0:
        return values.float()
    return (values - values.mean()).masked_fill(is_flat(values.min(), values.max()), 0.0).float()


def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """(C,) r - r of the greedy completion of the same prompt (arXiv:2310.10505), which is not trained on; exactly 0 where both are alike."""
    values, twin = checked(rewards), checked(greedy_rewards)
    assert values.shape == twin.shape, (values.shape, twin.shape)
    return (values - twin).masked_fill(is_flat(torch.minimum(values, twin), torch.maximum(values, twin)), 0.0).float()


def distill(old: Tensor, teacher: Tensor, *, coefficient: float) -> Tensor:
    """(N,) -coefficient x clamp(old - teacher, -20, 20) for each trained token: the step's estimate of the reverse KL, taken as a reward of the
    token alone (on-policy distillation). `old`, `teacher`: log-probs of the sampled token under the sampling policy and the teacher."""
    difference = (old.detach().double() - teacher.detach().double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (-coefficient * difference).float()


def own(values: Tensor) -> Tensor:
    """(C,) what a user's function gave, finite and one number a completion."""
    return checked(values).float()
