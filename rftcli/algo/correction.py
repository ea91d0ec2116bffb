"""Sampler against trainer: weights of tokens for the difference between the distribution that was sampled from and the one that is trained.

`gap` (N,) is old - samp, the trainer's log-prob at rollout time less the one that the sampler reported; where the sampler reported none it is 0, and
the ratio 1. rho_s = exp(gap within +-20). Nothing here has a gradient.

What it leaves out: which completions leave the update, and statistics over ranks (the stage's).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rftcli.algo.kl import LOG_RATIO_BOUND
from rftcli.algo.loss_terms import per_sequence, sequence_means


def gaps(old: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
    """(gap (N,) float64, missing (N,) bool). A sampler's log-prob that is NaN or infinite is missing."""
    missing = ~torch.isfinite(sampler)
    return torch.where(missing, 0.0, old.double() - sampler.double()), missing


def ratios(gap: Tensor, sequence: Tensor, num_sequences: int, *, level: str) -> Tensor:
    """(N,) rho_s of each token: its own ("token"), the product over its sequence ("sequence"), or the geometric mean ("geometric")."""
    if level == "token":
        logs = gap
    else:
        assert level in ("sequence", "geometric"), level
        reduce = per_sequence if level == "sequence" else sequence_means
        logs = reduce(gap, sequence, num_sequences)[sequence]
    return logs.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def truncated(ratio: Tensor, cap: float) -> Tensor:
    """min(rho_s, cap): truncated importance sampling (TIS)."""
    return ratio.clamp(max=cap)


def masked(ratio: Tensor, band: tuple[float, float]) -> Tensor:
    """rho_s inside [low, high], else 0 (IcePop, arXiv:2510.18855)."""
    low, high = band
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def gated(ratio: Tensor, old: Tensor, gap: Tensor, *, gate: str, bound: float) -> Tensor:
    """rho_s where a divergence of the two distributions over {this token, any other} is at most `bound`, else 0.

    "tv": |p - q|, p = exp(old), q = exp(samp); "kl": q log(q / p) + (1 - q) log((1 - q) / (1 - p)), that of sampler from trainer.
    """
    assert gate in ("tv", "kl"), gate
    p, q = old.double().exp(), (old.double() - gap).exp()
    if gate == "tv":
        distance = (p - q).abs()
    else:
        other_p, other_q = (1 - p).clamp(min=1e-12), (1 - q).clamp(min=1e-12)
        distance = -q * gap + other_q * (other_q / other_p).log()
    return torch.where(distance <= bound, ratio, 0.0)


def rejected(
    gap: Tensor, sequence: Tensor, num_sequences: int, *, by: str, band: tuple[float, float] | None = None, bound: float | None = None
) -> Tensor:
    """(num_sequences,) bool: sequences too far from their sampler.

    "k1": the geometric mean of rho_s outside `band`; "k2", "k3": the mean of gap^2 / 2, of rho_s - 1 - log rho_s, above `bound`; "max": the largest
    of the latter above it. A sequence without trained tokens is never rejected.
    """
    bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if by == "k1":
        assert band is not None, "k1 is held within a band"
        mean = sequence_means(gap, sequence, num_sequences)
        trained = torch.bincount(sequence, minlength=num_sequences) > 0
        return trained & ((mean < math.log(band[0])) | (mean > math.log(band[1])))
    assert bound is not None, f"{by} has a bound"
    if by == "k2":
        return sequence_means(gap.square() / 2, sequence, num_sequences) > bound
    k3 = torch.expm1(bounded) - bounded
    if by == "k3":
        return sequence_means(k3, sequence, num_sequences) > bound
    assert by == "max", by
    return torch.zeros(num_sequences, dtype=k3.dtype).scatter_reduce(0, sequence, k3, "amax", include_self=True) > bound
