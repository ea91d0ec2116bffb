"""Estimators that compare a completion with the others of its group: one number a completion, over all scored completions of a step.

Standard deviations have the divisor n - 1. A group without spread, and so a group of one, has advantages of exactly 0. Computed in float64, returned
in float32; no gradient. What it leaves out: whitening and clipping, which see the whole step at once, and the table (`advantages`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rftcli.algo.groups import EPS_STD, group_deviation, grouped, is_flat, standard_deviation, without_flat


def grpo(rewards: Tensor, group: Tensor, *, normalise_std: bool = True, std: str = "group", min_std: float = 0.0, eps: float = EPS_STD) -> Tensor:
    """(C,) (r - group mean) / (std + eps) (arXiv:2402.03300).

    `normalise_std` False: r - group mean (Dr. GRPO, arXiv:2503.20783). `std`: "group", or "batch" for the deviation of all rewards of the step.
    `min_std`: a smaller deviation counts as this one.
    """
    assert std in ("group", "batch"), std
    values, groups = grouped(rewards, group)
    centred = values - groups.mean[groups.index]
    if normalise_std:
        if std == "batch":
            deviation = standard_deviation((values - values.mean()).square().sum(), values.numel())
        else:
            deviation = group_deviation(values, groups)[groups.index]
        centred = centred / (deviation.clamp(min=min_std) + eps)
    return without_flat(centred, groups)


def centred(rewards: Tensor, group: Tensor) -> Tensor:
    """(C,) r - group mean: CPGD (arXiv:2505.12504), and REINFORCE++-baseline before its whitening (arXiv:2501.03262)."""
    return grpo(rewards, group, normalise_std=False)


def rloo(rewards: Tensor, group: Tensor) -> Tensor:
    """(C,) r - mean of the group's other rewards = n / (n - 1) x (r - group mean), n = scored completions of the group (arXiv:2402.14740)."""
    values, groups = grouped(rewards, group)
    n = groups.count[groups.index].double()
    return without_flat((values - groups.mean[groups.index]) * n / (n - 1).clamp(min=1), groups)


def opo(rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """(C,) r - sum(length x r) / sum(length) over the group, the baseline of least variance (arXiv:2505.23585). `lengths` (C,): trained tokens.

    A group without any trained token has the plain mean as its baseline: nothing of it is trained on.
    """
    values, groups = grouped(rewards, group)
    assert lengths.shape == values.shape and bool((lengths >= 0).all()), (lengths.shape, values.shape)
    weights = lengths.double()
    weights = torch.where(groups.total(weights)[groups.index] > 0, weights, 1.0)
    baseline = groups.total(weights * values) / groups.total(weights)
    return without_flat(values - baseline[groups.index], groups)


def gpg(rewards: Tensor, group: Tensor) -> Tensor:
    """(C,) alpha x (r - group mean), alpha = groups / groups with spread over the whole step, 0 if there is none (arXiv:2504.02546)."""
    values, groups = grouped(rewards, group)
    with_spread = int((~groups.flat).sum())
    alpha = groups.ids.numel() / with_spread if with_spread else 0.0
    return without_flat(alpha * (values - groups.mean[groups.index]), groups)


def grpo_passk(rewards: Tensor, group: Tensor, *, normalise_std: bool = False, min_std: float = 0.0, eps: float = EPS_STD) -> Tensor:
    """(C,) for the best completion of a group r_max - r_second, for all others 0, so that a tie is 0 (arXiv:2503.19595).

    `normalise_std`: over the group's deviation, as grpo.
    """
    values, groups = grouped(rewards, group)
    best = values == groups.highest[groups.index]
    second = torch.full_like(groups.mean, -torch.inf).scatter_reduce(0, groups.index, values.masked_fill(best, -torch.inf), "amax")
    tie = (groups.total(best.double()) > 1) | is_flat(second, groups.highest)
    gap = torch.where(best & ~tie[groups.index], values - second[groups.index], 0.0)
    if normalise_std:
        gap = gap / (group_deviation(values, groups).clamp(min=min_std) + eps)[groups.index]
    return without_flat(gap, groups)


def gdpo(scores: Tensor, present: Tensor, weights: Tensor, group: Tensor, *, min_std: float = 0.0, eps: float = EPS_STD) -> Tensor:
    """(C,) sum over the parts of a reward of weight x (score - group mean) / (std + eps), each part on its own (arXiv:2601.05242); before whitening.

    `scores`, `weights` (C, P); `present` (C, P) bool: where a part gave a score. A part that abstained counts 0 and moves no mean.
    """
    assert scores.shape == present.shape == weights.shape and scores.dim() == 2, (scores.shape, present.shape, weights.shape)
    found = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    for part in range(scores.shape[1]):
        there = present[:, part]
        advantages = grpo(scores[there, part], group[there], min_std=min_std, eps=eps)
        found[there] += weights[there, part].double() * advantages.double()
    return found.float()
