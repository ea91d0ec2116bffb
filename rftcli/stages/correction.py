"""Sampler against trainer, over the completions of a step: old log-probs from the engine, weights of tokens, and sequences that leave the update.

Everything is settled before advantages: a rejected completion keeps its place in its group's baseline, and leaves the mask, so every denominator.
Statistics are over all ranks. Leaves out the arithmetic (`algo.correction`) and where weights are applied (`learn`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rftcli.algo import align, correction
from rftcli.plan.plan import LossPlan
from rftcli.protocols import World
from rftcli.types import Experience


def correct(experiences: Sequence[Experience], plan: LossPlan, world: World) -> dict[str, Any]:
    """Set `correction`, or `old_logprobs` where they are the sampler's, and take rejected completions out; the step event's `correction`. Collective.

    What the sampler did not report, or not as a number, has the ratio 1 and is counted in `missing`.
    """
    if not plan.reads_sampler:
        return {}
    for item in experiences:
        if item.sampler_logprobs is None:
            item.sampler_logprobs = torch.full(item.mask.shape, torch.nan)
    if plan.correction is None:
        return _from_sampler(experiences, world)
    return _weigh(experiences, plan, world)


def _from_sampler(experiences: Sequence[Experience], world: World) -> dict[str, Any]:
    """Old log-probs as the engine reported them. Missing ones are NaN, for the loss to put the current ones there."""
    missing = 0
    for item in experiences:
        assert item.sampler_logprobs is not None
        unknown = ~torch.isfinite(item.sampler_logprobs)
        missing += int((unknown & item.mask).sum())
        item.old_logprobs = torch.where(unknown, torch.nan, item.sampler_logprobs)
    return {"correction": {"missing": int(world.sum([missing])[0])}}


def _weigh(experiences: Sequence[Experience], loss: LossPlan, world: World) -> dict[str, Any]:
    plan = loss.correction
    assert plan is not None
    masks = [item.mask for item in experiences]
    lengths = torch.tensor([int(mask.sum()) for mask in masks])
    sequence = torch.repeat_interleave(torch.arange(len(masks)), lengths)  # (N,)
    old = align.flatten([item.old_logprobs for item in experiences if item.old_logprobs is not None], masks)
    sampler = align.flatten([item.sampler_logprobs for item in experiences if item.sampler_logprobs is not None], masks)
    gap, missing = correction.gaps(old, sampler)
    raw = correction.ratios(gap, sequence, len(masks), level=plan.level)
    weights = _weights(raw, old, gap, loss)
    out = torch.zeros(len(masks), dtype=torch.bool)
    if plan.reject is not None:
        out = correction.rejected(gap, sequence, len(masks), by=plan.reject.by, band=plan.reject.band, bound=plan.reject.bound)
    gone = out[sequence]
    k3 = torch.expm1(gap.clamp(-20, 20)) - gap.clamp(-20, 20)
    sums = world.sum(
        [float(raw.numel()), *(float(part.double().sum()) for part in (raw, raw.square(), k3, gone | (weights == 0), missing)),
         float(out.sum()), float((lengths > 0).sum())]
    )  # fmt: skip
    (largest,) = world.max([float(raw.max()) if raw.numel() else 0.0])
    if plan.batch_normalise:
        weights = _normalised(weights, ~gone, sequence, lengths, by_token=plan.level == "token", world=world)
    for item, part, reject in zip(experiences, align.unflatten(weights.float(), masks), out.tolist(), strict=True):
        item.correction = part
        if reject:
            item.mask = torch.zeros_like(item.mask)
    return _metrics(sums, largest, rejects=plan.reject is not None)


def _weights(raw: torch.Tensor, old: torch.Tensor, gap: torch.Tensor, loss: LossPlan) -> torch.Tensor:
    """(N,) before normalising."""
    plan = loss.correction
    assert plan is not None
    if plan.kind == "reject":
        return torch.ones_like(raw)
    if plan.kind == "truncate":
        return correction.truncated(raw, plan.cap)
    assert plan.kind == "mask", plan.kind
    if plan.gate == "ratio":
        return correction.masked(raw, plan.band)
    assert plan.bound is not None
    return correction.gated(raw, old, gap, gate=plan.gate, bound=plan.bound)


def _normalised(
    weights: torch.Tensor, stays: torch.Tensor, sequence: torch.Tensor, lengths: torch.Tensor, *, by_token: bool, world: World
) -> torch.Tensor:
    """Weights over their mean of what stays: over tokens at token level, else over sequences. Left alone where all are 0. Collective."""
    share = torch.ones_like(weights) if by_token else 1.0 / lengths[sequence].double()
    total, count = world.sum([float((weights * share)[stays].sum()), float(share[stays].sum())])
    return weights * (count / total) if total > 0 else weights


def _metrics(sums: Sequence[float], largest: float, *, rejects: bool) -> dict[str, Any]:
    """`correction` of the step event: of rho_s as it is, before it is bounded, over the trained tokens before any rejection."""
    tokens, total, squares, k3, without, missing, out, sequences = sums
    if tokens == 0:
        return {}
    found: dict[str, float] = {
        "mean": total / tokens,
        "max": largest,
        "masked_fraction": without / tokens,
        "effective": total * total / (tokens * squares),
        "k3": k3 / tokens,
        "missing": int(missing),
    }
    return {"correction": found | ({"rejected_fraction": out / sequences} if rejects else {})}
