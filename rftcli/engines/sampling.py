"""From scores to a token: temperature, filters, and the inverse of the cumulative distribution at a given uniform number. Pure functions.

Everything is float64, so that the choice is a function of the scores and the uniform alone, and log-probs are those of the distribution that was
sampled from: after temperature and filters. Off means off: there is no hidden top-k.

What it leaves out: where uniforms come from (`noise`), and what changes scores before the temperature (`shaping`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def log_weights(
    scores: Tensor,
    *,
    temperature: float | Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    filters: Sequence[Callable[[Tensor], Tensor]] = (),
) -> Tensor:
    """(R, V) float64 log-probs up to a constant per row, the largest 0, of the sampled distribution; -inf for what the filters remove.

    `scores` (R, V) are the model's, or as `shaping` left them. Order: temperature (one, or (R,) of each row), top-k, top-p (of the mass that
    top-k left), min-p, `filters`.
    """
    weights = scores.to(torch.float64, copy=True)
    if isinstance(temperature, Tensor):
        weights /= temperature[:, None]
    elif temperature != 1.0:
        assert temperature > 0, f"temperature {temperature}: greedy choices have no weights"
        weights /= temperature
    if top_k > 0:
        weights = keep_top_k(weights, top_k)
    if top_p < 1.0:
        weights = keep_top_p(weights, top_p)
    if min_p > 0.0:
        weights = keep_min_p(weights, min_p)
    for keep in filters:
        weights = keep(weights)
    return weights.sub_(weights.amax(-1, keepdim=True))


def keep_top_k(weights: Tensor, top_k: int) -> Tensor:
    """The k largest of each row (R, V); tokens that tie with the k-th stay too."""
    kth = weights.topk(min(top_k, weights.shape[-1]), dim=-1).values[:, -1:]
    return weights.masked_fill(weights < kth, -torch.inf)


def keep_top_p(weights: Tensor, top_p: float) -> Tensor:
    """The nucleus of each row (R, V): the fewest most probable tokens whose mass is at least top_p (1904.09751). The first always stays."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1)
    before = mass.cumsum(-1) - mass  # mass of the more probable tokens
    drop = before >= top_p
    drop[:, 0] = False
    return weights.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def keep_min_p(weights: Tensor, min_p: float) -> Tensor:
    """Tokens of each row (R, V) at least min_p times as probable as the most probable one (2407.01082)."""
    return weights.masked_fill((weights - weights.amax(-1, keepdim=True)).exp() < min_p, -torch.inf)


def draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """(ids (R,) int64, mass (R,) float64): the first token whose cumulative probability exceeds the uniform (R,) in [0, 1), and the sum of all
    weights, which `logprobs_of` needs.

    `weights` (R, V) as `log_weights` gives them. A row whose scores are not numbers gets the id -1.
    """
    cumulative = weights.exp().cumsum_(-1)  # (R, V)
    total = cumulative[:, -1].contiguous()
    # below the total even when the product rounds up to it: a token of probability zero is never taken
    point = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, point[:, None], right=True).squeeze(-1)
    return torch.where(total < torch.inf, ids, -1), total


def logprobs_of(weights: Tensor, ids: Tensor, mass: Tensor) -> Tensor:
    """(R,) float64 of the tokens (R,) that `draw` has chosen."""
    return weights.gather(-1, ids.clamp(min=0)[:, None]).squeeze(-1) - mass.log()


def choose_greedily(scores: Tensor) -> Tensor:
    """(R,) the most probable token of each row (R, V), the lowest id among equals; -1 where the scores are not numbers."""
    best = scores.amax(-1, keepdim=True)
    return torch.where(best.isfinite().squeeze(-1), (scores == best).int().argmax(-1), -1)
