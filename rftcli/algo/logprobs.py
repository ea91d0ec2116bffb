"""Log-probabilities and entropies of chosen tokens, without ever holding the scores of all N positions over the whole vocabulary.

At 1,000 positions a micro-batch and 150,000 words, one float32 copy of the scores is 0.6 GB and training keeps several. Here a chunk of
positions is scored at a time, and scored again in the backward pass. Values and gradients are those of the plain computation.

What it leaves out: the model body, and knowing what its head is (a callable, so soft caps and scales stay the model's own).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LEAST_LOGPROB = -1e30
"""Stands for the logarithm of 0 where that is multiplied by 0."""


def plain_logprobs(logits: Tensor, targets: Tensor, temperature: float | Tensor, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """(log-probs (N,), entropy (N,)), float32 nats, of targets (N,) under softmax(logits (N, V) / temperature).

    `temperature` is one for all, or (N,): each token's own. The entropy has a gradient only if asked for: it costs one more copy of the scores in
    the backward pass.
    """
    logits = logits.float()
    if isinstance(temperature, Tensor):
        logits = logits / temperature[:, None]
    elif temperature != 1.0:
        assert temperature > 0, f"temperature {temperature}: a greedy choice has no log-probability to train on"
        logits = logits / temperature
    table = torch.log_softmax(logits, dim=-1)  # (N, V)
    logprobs = table.gather(-1, targets[:, None]).squeeze(-1)
    if entropy_gradient:
        surprise = -table.masked_fill(table.isneginf(), 0.0)  # a word without probability counts 0, in the gradient too
        return logprobs, (table.exp() * surprise).sum(-1)
    # the entropy comes last, so that the recomputation in the backward pass stops before it; a word without probability counts 0
    with torch.no_grad():
        entropy = -table.exp().mul_(table.clamp(min=LEAST_LOGPROB)).sum(-1)
    return logprobs, entropy


def chunked_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float | Tensor,
    chunk: int,
    calls: int = 1,
    entropy_gradient: bool = False,
    read: Callable[..., tuple[Tensor, Tensor]] = plain_logprobs,
) -> tuple[Tensor, Tensor]:
    """`plain_logprobs` (`read`, if given, says the same) of head(hidden (N, H)) -> (N, V), for `chunk` positions at a time.

    With more than one chunk and gradients on, a chunk's scores are dropped after the forward pass and computed again in the backward pass. The head
    must not draw random numbers. It is called at least `calls` times, if need be on no positions: where its weight is sharded, each call is a
    collective and all ranks have to make the same number.
    """
    assert chunk >= 1 and calls >= 1, (chunk, calls)
    assert hidden.shape[:1] == targets.shape, (hidden.shape, targets.shape)

    def scored(part: Tensor, part_targets: Tensor, part_temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        return read(head(part), part_targets, part_temperature, entropy_gradient=entropy_gradient)

    calls = max(calls, -(-len(targets) // chunk))
    if calls == 1:
        return scored(hidden, targets, temperature)
    temperatures = temperature.tensor_split(calls) if isinstance(temperature, Tensor) else [temperature] * calls
    parts = list(zip(hidden.tensor_split(calls), targets.tensor_split(calls), temperatures, strict=True))
    if torch.is_grad_enabled():
        outputs = [checkpoint(scored, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    else:
        outputs = [scored(*part) for part in parts]
    logprobs, entropies = zip(*outputs, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
