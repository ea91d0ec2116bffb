"""The groups of a step: their statistics, which of them have a spread, and the exact zeros of those that have none.

A group is named by an integer (its draw), never by its prompt's text or tokens: the same prompt drawn twice is two groups. Completions that could
not be scored are absent from the vectors, so they move no baseline. Everything is float64. What it leaves out: the estimators (`advantages`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPS_STD = 1e-4
"""Added to a standard deviation before dividing by it."""

FLAT_SPREAD = 1e-6
"""A group whose max - min is below this, relative to max(1, max |r|), has no spread: what is left is rounding noise (eight rewards of 0.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Statistics of the groups. `index` (C,) points from a completion to its group; the others are (K,), by group."""

    ids: Tensor
    index: Tensor
    count: Tensor
    mean: Tensor
    highest: Tensor
    flat: Tensor

    def total(self, values: Tensor) -> Tensor:
        """(K,) sums of values (C,)."""
        return torch.zeros_like(self.mean).index_add(0, self.index, values)


def grouped(rewards: Tensor, group: Tensor) -> tuple[Tensor, Groups]:
    """Rewards (C,) in float64 and the statistics of their groups."""
    values = checked(rewards)
    assert group.shape == values.shape and not group.is_floating_point(), (group.shape, group.dtype, values.shape)
    ids, index, count = torch.unique(group, return_inverse=True, return_counts=True)
    zeros = torch.zeros(ids.numel(), dtype=torch.float64, device=values.device)
    highest = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    mean = zeros.index_add(0, index, values) / count
    return values, Groups(ids=ids, index=index, count=count, mean=mean, highest=highest, flat=is_flat(lowest, highest))


def is_flat(lowest: Tensor, highest: Tensor) -> Tensor:
    """Whether numbers between these bounds differ by no more than rounding, relative to their size."""
    return highest - lowest < FLAT_SPREAD * torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)


def checked(rewards: Tensor) -> Tensor:
    """(C,) float64 without gradient. A completion that could not be scored must be left out, not passed as NaN."""
    assert rewards.dim() == 1, rewards.shape
    values = rewards.detach().double()
    assert bool(torch.isfinite(values).all()), "a reward is not finite"
    return values


def standard_deviation(squares: Tensor, count: Tensor | int) -> Tensor:
    """Divisor n - 1, from summed squared deviations; 0 for a single value."""
    return (squares / (torch.as_tensor(count, device=squares.device) - 1).clamp(min=1)).sqrt()


def group_deviation(values: Tensor, groups: Groups) -> Tensor:
    """(K,) the deviation of each group's values (C,)."""
    return standard_deviation(groups.total((values - groups.mean[groups.index]).square()), groups.count)


def without_flat(advantages: Tensor, groups: Groups) -> Tensor:
    """Advantages in float32, exactly 0 in groups without spread."""
    return advantages.masked_fill(groups.flat[groups.index], 0.0).float()


def groups_with_spread(rewards: Tensor, group: Tensor) -> Tensor:
    """(K,) ascending ids of the groups that have a spread, so at least two scored completions."""
    _, groups = grouped(rewards, group)
    return groups.ids[~groups.flat]


def zero_signal_fraction(rewards: Tensor, group: Tensor, num_groups: int) -> float:
    """Share of a step's `num_groups` groups that teach nothing: no spread, fewer than two scored completions, or none at all."""
    with_spread = groups_with_spread(rewards, group).numel()
    assert num_groups >= 1 and with_spread <= num_groups, (with_spread, num_groups)
    return 1.0 - with_spread / num_groups
