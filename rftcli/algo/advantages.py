"""From rewards to advantages, one function per estimator, over all scored completions of a step.

Completions that could not be scored are absent from the vectors, so they move no baseline. A group is named by an integer (its draw), never by
its prompt's text or tokens: the same prompt drawn twice is two groups. Standard deviations have the divisor n - 1. A group without spread, and
so a group of one, has advantages of exactly 0. Computed in float64, returned in float32; no gradient.

What it leaves out: rewards, and laying an advantage over the tokens of its completion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rftcli.algo.returns import gae, returns_to_go

EPS_STD = 1e-4
"""Added to a standard deviation before dividing by it."""

FLAT_SPREAD = 1e-6
"""A group whose max - min is below this, relative to max(1, max |r|), has no spread: what is left is rounding noise (eight rewards of 0.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """One row of ADVANTAGES."""

    function: Callable[..., Tensor]
    level: str
    """What one value belongs to. "completion": the function returns (C,). "token": (N,), over the trained tokens of completions (`returns`)."""
    inputs: tuple[str, ...]
    """Positional arguments, by name: rewards (C,), group (C,); at token level token_rewards (N,), values (N,), sequence (N,)."""
    options: tuple[str, ...]
    """Keyword arguments that a recipe may set."""
    min_samples: int
    """Fewest samples per prompt that make sense."""
    baseline: bool
    """Whether a group is compared with itself, so that groups without spread teach nothing."""
    source: str
    summary: str
    whiten: str | None = None
    """What the estimator's own formula is whitened over: "tokens" or "completions"; None: it is not, unless a recipe asks for it."""
    per_token: Callable[..., Tensor] | None = None
    """The same estimator for rewards per token: (token_rewards (N,), sequence (N,), *, gamma) -> (N,). Used where rewards are discounted, or hold
    a KL term for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Statistics of the groups. `index` (C,) points from a completion to its group; the others are (K,), by group."""

    ids: Tensor
    index: Tensor
    count: Tensor
    mean: Tensor
    flat: Tensor


def grpo(rewards: Tensor, group: Tensor, *, normalise_std: bool = True, std: str = "group", eps: float = EPS_STD) -> Tensor:
    """(C,) (r - group mean) / (std + eps) (arXiv:2402.03300).

    `normalise_std` False: r - group mean (Dr. GRPO, arXiv:2503.20783). `std`: "group", or "batch" for the deviation of all rewards of the step.
    """
    assert std in ("group", "batch"), std
    values, groups = _grouped(rewards, group)
    centred = values - groups.mean[groups.index]
    if normalise_std:
        if std == "batch":
            deviation = _std((values - values.mean()).square().sum(), values.numel())
        else:
            squares = torch.zeros_like(groups.mean).index_add(0, groups.index, centred.square())
            deviation = _std(squares, groups.count)[groups.index]
        centred = centred / (deviation + eps)
    return _without_flat(centred, groups)


def rloo(rewards: Tensor, group: Tensor) -> Tensor:
    """(C,) r - mean of the group's other rewards = n / (n - 1) x (r - group mean), n = scored completions of the group (arXiv:2402.14740)."""
    values, groups = _grouped(rewards, group)
    n = groups.count[groups.index].double()
    return _without_flat((values - groups.mean[groups.index]) * n / (n - 1).clamp(min=1), groups)


def reinforce(rewards: Tensor) -> Tensor:
    """(C,) the reward itself."""
    return _checked(rewards).float()


def groups_with_spread(rewards: Tensor, group: Tensor) -> Tensor:
    """(K,) ascending ids of the groups that have a spread, so at least two scored completions."""
    _, groups = _grouped(rewards, group)
    return groups.ids[~groups.flat]


def zero_signal_fraction(rewards: Tensor, group: Tensor, num_groups: int) -> float:
    """Share of a step's `num_groups` groups that teach nothing: no spread, fewer than two scored completions, or none at all."""
    with_spread = groups_with_spread(rewards, group).numel()
    assert num_groups >= 1 and with_spread <= num_groups, (with_spread, num_groups)
    return 1.0 - with_spread / num_groups


def _grouped(rewards: Tensor, group: Tensor) -> tuple[Tensor, _Groups]:
    """Rewards (C,) in float64 and the statistics of their groups."""
    values = _checked(rewards)
    assert group.shape == values.shape and not group.is_floating_point(), (group.shape, group.dtype, values.shape)
    ids, index, count = torch.unique(group, return_inverse=True, return_counts=True)
    zeros = torch.zeros(ids.numel(), dtype=torch.float64, device=values.device)
    highest = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    largest = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return values, _Groups(
        ids=ids, index=index, count=count, mean=zeros.index_add(0, index, values) / count, flat=highest - lowest < FLAT_SPREAD * largest
    )


def _checked(rewards: Tensor) -> Tensor:
    """(C,) float64 without gradient. A completion that could not be scored must be left out, not passed as NaN."""
    assert rewards.dim() == 1, rewards.shape
    values = rewards.detach().double()
    assert bool(torch.isfinite(values).all()), "a reward is not finite"
    return values


def _std(squares: Tensor, count: Tensor | int) -> Tensor:
    """Standard deviation, divisor n - 1, from summed squared deviations; 0 for a single value."""
    return (squares / (torch.as_tensor(count, device=squares.device) - 1).clamp(min=1)).sqrt()


def _without_flat(advantages: Tensor, groups: _Groups) -> Tensor:
    """Advantages in float32, exactly 0 in groups without spread."""
    return advantages.masked_fill(groups.flat[groups.index], 0.0).float()


# How to add one: write a function (inputs..., *, options...) -> (C,) float32 without gradient, whose inputs are names the credit stage knows and
# whose options are numbers, add a row under the name a recipe uses, and add the name to the recipe's Literal. With a baseline, end in
# `_without_flat`, so that groups without spread stay exactly 0.
ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(
        function=grpo,
        level="completion",
        inputs=("rewards", "group"),
        options=("normalise_std", "std"),
        min_samples=2,
        baseline=True,
        source="GRPO, arXiv:2402.03300; without the deviation Dr. GRPO, arXiv:2503.20783",
        summary="reward minus the group's mean, over the standard deviation",
    ),
    "rloo": Advantage(
        function=rloo,
        level="completion",
        inputs=("rewards", "group"),
        options=(),
        min_samples=2,
        baseline=True,
        source="RLOO, arXiv:2402.14740",
        summary="reward minus the mean of the group's other rewards",
    ),
    "reinforce": Advantage(
        function=reinforce,
        level="completion",
        inputs=("rewards",),
        options=(),
        min_samples=1,
        baseline=False,
        source="Williams 1992, https://doi.org/10.1007/BF00992696",
        summary="the reward itself, no baseline",
        per_token=returns_to_go,
    ),
    "gae": Advantage(
        function=gae,
        level="token",
        inputs=("token_rewards", "values", "sequence"),
        options=("gamma", "lam"),
        min_samples=1,
        baseline=False,
        source="GAE, arXiv:1506.02438; PPO, arXiv:1707.06347",
        summary="discounted sums of the critic's errors, whitened over the tokens of the step",
        whiten="tokens",
    ),
}
