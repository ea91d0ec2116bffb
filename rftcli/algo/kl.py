"""How far the policy has moved from the reference: estimators of the KL divergence per token, and controllers of its coefficient.

d = log-prob of the policy - log-prob of the reference, at the sampled token. All estimators are functions of d alone.

What it leaves out: where the term goes (the loss adds coefficient x estimator, weighted like the policy term) and reference models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Differences of log-probs are held within +-20 before anything exponentiates them: exp(20) = 4.9e8 is far beyond any clip range and far from
the end of float32."""

CONTROLLER_STEP = 0.2
"""The adaptive controller looks at a relative error of at most this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kl:
    """One row of KLS."""

    function: Callable[[Tensor, Tensor], Tensor]
    """(log-probs (N,), reference (N,)) -> (N,)"""
    pulls: bool
    """Whether its gradient in the loss pulls towards the reference on average; one that does not is refused there."""
    unbiased_in_reward: bool
    gradient: str
    """d estimator / d log-prob."""
    source: str
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """One row of CONTROLLERS."""

    function: Callable[..., float]
    options: tuple[str, ...]
    source: str
    summary: str


def log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """(N,) logprobs - other, within +-LOG_RATIO_BOUND (no gradient beyond it)."""
    return (logprobs - other).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(N,) d: unbiased, may be negative."""
    return log_ratio(logprobs, reference)


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(N,) d^2 / 2: biased, its on-policy gradient is that of KL(policy || reference)."""
    return 0.5 * log_ratio(logprobs, reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(N,) exp(-d) - 1 + d: unbiased, never negative."""
    d = log_ratio(logprobs, reference)
    return torch.expm1(-d) + d  # exp(-d) - 1 would lose every digit of a small d, and go negative


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(N,) |d|."""
    return log_ratio(logprobs, reference).abs()


def loss_term(
    kind: str, new: Tensor, reference: Tensor, old: Tensor, *, unbiased_gradient: bool = False, ratio_weighted: bool = False
) -> Tensor:
    """(N,) the estimator `kind` as it stands in the loss.

    `unbiased_gradient`: the estimator's value with the gradient of k2, which is that of KL(policy || reference) on policy. `ratio_weighted`: rho k,
    rho = exp(new - old) with its gradient, so that the term is right under samples of the old policy too (arXiv:2512.02556): the gradient is rho d
    for k3, rho (1 + d) for k1.
    """
    assert not (unbiased_gradient and ratio_weighted), "one gradient or the other"
    value = KLS[kind].function(new, reference)
    if unbiased_gradient:
        force = k2(new, reference)
        return value.detach() + (force - force.detach())
    return log_ratio(new, old.detach()).exp() * value if ratio_weighted else value


def fixed_coefficient(coefficient: float, kl: float) -> float:
    """The coefficient, whatever the KL."""
    return coefficient


def adaptive_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, completions: int) -> float:
    """The next step's coefficient (arXiv:1909.08593): times 1 + clip(kl / target - 1, -0.2, 0.2) x completions / horizon.

    `kl` is the step's KL as applied (token mean, or mean of sequence sums); `completions` those of the step. A KL that is not a number, as after
    an update that was skipped, changes nothing.
    """
    assert target > 0 and horizon > 0, (target, horizon)
    if math.isnan(kl):
        return coefficient
    error = min(CONTROLLER_STEP, max(-CONTROLLER_STEP, kl / target - 1.0))
    return coefficient * (1.0 + error * completions / horizon)


_SCHULMAN = "Schulman 2020, http://joschu.net/blog/kl-approx.html"

# How to add one: write a function (log-probs (N,), reference (N,)) -> (N,) that goes through `log_ratio`, add a row under the name a recipe uses,
# and add the name to the recipe's Literal. `pulls` is False if the mean of its gradient under the policy is 0.
KLS: dict[str, Kl] = {
    "k1": Kl(function=k1, pulls=False, unbiased_in_reward=True, gradient="1", source=_SCHULMAN, summary="d"),
    "k2": Kl(function=k2, pulls=True, unbiased_in_reward=False, gradient="d", source=_SCHULMAN, summary="d^2 / 2"),
    "k3": Kl(function=k3, pulls=True, unbiased_in_reward=False, gradient="1 - exp(-d)", source=_SCHULMAN, summary="exp(-d) - 1 + d"),
    "abs": Kl(function=absolute, pulls=True, unbiased_in_reward=False, gradient="sign(d)", source="", summary="|d|"),
}

# How to add one: write a function (coefficient, kl, *, options) -> the next coefficient, without a state of its own, and add a row.
CONTROLLERS: dict[str, Controller] = {
    "fixed": Controller(function=fixed_coefficient, options=(), source="", summary="the coefficient of the recipe throughout"),
    "adaptive": Controller(
        function=adaptive_coefficient,
        options=("target", "horizon", "completions"),
        source="arXiv:1909.08593",
        summary="raises the coefficient while the KL is above its target, lowers it while it is below",
    ),
}
