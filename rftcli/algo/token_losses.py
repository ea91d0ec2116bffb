"""Policy losses with one term a token. Every loss is minimised; rho = exp(new - old), the difference held within +-20.

Advantages and old log-probs carry no gradient. Where a bound holds, its value is selected, never mixed in by multiplication.

What it leaves out: losses that look at whole sequences (`sequence_losses`) or at the whole update (`cov_losses`), aggregation and the KL term.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rftcli.algo.kl import log_ratio
from rftcli.algo.loss_terms import LossTerms


def ppo_clip(
    new: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> LossTerms:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), rho = exp(new - old) (arXiv:1707.06347; two bounds arXiv:2503.14476).

    `dual_clip` c > 1: for A < 0 at most -c A (arXiv:1912.09729). It is not counted as clipped. For the first update on policy pass
    old = new.detach(): rho is exactly 1, and its gradient the score function's.
    """
    return clipped(log_ratio(new, old.detach()).exp(), advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> LossTerms:
    """The clipped objective of ratios (N,), whatever they are ratios of; the gradient flows through them."""
    assert 0 <= clip_low <= 1 and clip_high >= 0 and (dual_clip is None or dual_clip > 1), (clip_low, clip_high, dual_clip)
    advantages = advantages.detach()
    clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    loss = -advantages * ratio
    loss = torch.where(clipped_low, -advantages * (1 - clip_low), loss)
    loss = torch.where(clipped_high, -advantages * (1 + clip_high), loss)
    if dual_clip is not None:
        loss = torch.where((advantages < 0) & (ratio > dual_clip), -advantages * dual_clip, loss)
    return LossTerms(loss=loss, clipped_low=clipped_low, clipped_high=clipped_high, ratio=ratio.detach())


def cispo(new: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> LossTerms:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A new (arXiv:2506.13585): the weight is bounded, and no token loses its gradient.

    `clip_low` 1 is no floor. Counted as clipped where ppo_clip would count: low with A < 0, high with A > 0; a bound holds for both signs.
    """
    assert 0 <= clip_low <= 1 and clip_high >= 0, (clip_low, clip_high)
    advantages = advantages.detach()
    ratio = log_ratio(new.detach(), old.detach()).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    low, high = (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)
    return LossTerms(loss=-weight * advantages * new, clipped_low=low, clipped_high=high, ratio=ratio)


def sapo(new: Tensor, old: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> LossTerms:
    """-A sigmoid(tau (rho - 1)) 4 / tau, tau by the sign of A, 1 and 1.05 in the paper (arXiv:2511.20347).

    A soft gate in the place of a clip; the gradient at rho = 1 is -A.
    """
    assert tau_positive > 0 and tau_negative > 0, (tau_positive, tau_negative)
    advantages = advantages.detach()
    ratio = log_ratio(new, old.detach()).exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return LossTerms(loss=loss, ratio=ratio.detach())


def cpg(
    new: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, drift: float, drift_bound: float | None = None
) -> LossTerms:
    """-A c + drift (rho - 1 - (new - old)), c = min(new, old + log(1 + clip_high)) for A > 0, else max(new, old + log(1 - clip_low))
    (arXiv:2505.12504): the log-prob takes the place of the ratio. `drift` is the paper's alpha, of the distance from old; 0 is off. `drift_bound` is
    its c: the pull of the drift, rho - 1, grows no further than that."""
    assert 0 <= clip_low <= 1 and clip_high >= 0 and drift >= 0, (clip_low, clip_high, drift)
    advantages, old = advantages.detach(), old.detach()
    top = old + math.log1p(clip_high)
    floor = old + (math.log1p(-clip_low) if clip_low < 1 else -math.inf)
    clipped_high = (advantages > 0) & (new > top)
    clipped_low = (advantages < 0) & (new < floor)
    bounded = torch.where(clipped_high, top, torch.where(clipped_low, floor, new))
    difference = log_ratio(new, old)
    loss = -advantages * bounded
    if drift:
        loss = loss + drift * (torch.expm1(difference) - difference if drift_bound is None else _bounded_drift(new - old, drift_bound))
    return LossTerms(loss=loss, clipped_low=clipped_low, clipped_high=clipped_high, ratio=difference.detach().exp())


def _bounded_drift(difference: Tensor, bound: float) -> Tensor:
    """(N,) rho - 1 - log rho up to where its slope, rho - 1, is `bound`; from there a straight line: it pulls back however far rho has gone."""
    held = difference.clamp(max=math.log1p(bound))
    return torch.expm1(held) - held + bound * (difference - held)


def reinforce(new: Tensor, old: Tensor, advantages: Tensor, *, importance_weight: bool) -> LossTerms:
    """-A new (Williams 1992); with `importance_weight` times sg(rho), unbounded."""
    ratio = log_ratio(new.detach(), old.detach()).exp()
    loss = -advantages.detach() * new
    return LossTerms(loss=ratio * loss if importance_weight else loss, ratio=ratio)


def dro(new: Tensor, old: Tensor, advantages: Tensor, *, beta: float) -> LossTerms:
    """-(A new - beta / 2 (new - old)^2) (arXiv:2405.19107): a parabola keeps the policy where the samples came from."""
    assert beta >= 0, beta
    difference = new - old.detach()
    loss = -(advantages.detach() * new - 0.5 * beta * difference.square())
    return LossTerms(loss=loss, ratio=log_ratio(new.detach(), old.detach()).exp())
