"""From losses per token to one number: explicit denominators, counted over one optimizer update, all ranks and all micro-batches.

An aggregation is a weight for every trained token. The loss of a micro-batch is sum(weights x loss per token); the sum of that over micro-batches
and ranks is the update's loss, however the sequences were cut. A sequence must lie whole in one micro-batch.

What it leaves out: masks. Tokens that are not trained on are not in the vectors at all, so nothing multiplies them by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """One row of AGGREGATES."""

    function: Callable[..., Tensor]
    """(lengths (N,) float64, *, tokens, sequences, max_new_tokens) -> weights (N,) float64"""
    source: str
    summary: str


def token_weights(aggregate: str, sequence: Tensor, num_sequences: int, *, tokens: int, sequences: int, max_new_tokens: int) -> Tensor:
    """(N,) float32 weights of a micro-batch's trained tokens: loss = sum(weights x loss per token).

    `sequence` (N,) int64 says which of the micro-batch's sequences, 0..num_sequences-1, a token belongs to. `tokens` (trained tokens) and
    `sequences` (sequences with at least one) are counts over the whole update; see `count_trained`.
    """
    if sequence.numel() == 0:
        return torch.zeros(0, dtype=torch.float32, device=sequence.device)
    assert tokens >= sequence.numel() and sequences >= 1 and max_new_tokens >= 1, (tokens, sequences, max_new_tokens, sequence.numel())
    # counted where they are sorted: bincount has to look at its values, and a device would be waited for
    starts = torch.searchsorted(sequence, torch.arange(num_sequences + 1, device=sequence.device))
    lengths = starts.diff()[sequence].double()  # (N,) trained tokens of the sequence a token belongs to
    weights = AGGREGATES[aggregate].function(lengths, tokens=tokens, sequences=sequences, max_new_tokens=max_new_tokens)
    return weights.float()


def count_trained(masks: Sequence[Tensor]) -> tuple[int, int]:
    """(trained tokens, sequences with at least one) of some completions' masks (T,) bool: this rank's share of an update's denominators."""
    counts = [int(mask.sum()) for mask in masks]
    return sum(counts), sum(count > 0 for count in counts)


def token_mean(lengths: Tensor, *, tokens: int, sequences: int, max_new_tokens: int) -> Tensor:
    """Every token counts alike: sum / trained tokens."""
    return torch.full_like(lengths, 1.0 / tokens)


def sequence_mean(lengths: Tensor, *, tokens: int, sequences: int, max_new_tokens: int) -> Tensor:
    """Every sequence counts alike: mean over sequences of token means."""
    return 1.0 / (sequences * lengths)


def sequence_sum(lengths: Tensor, *, tokens: int, sequences: int, max_new_tokens: int) -> Tensor:
    """Mean over sequences of token sums."""
    return torch.full_like(lengths, 1.0 / sequences)


def fixed_length(lengths: Tensor, *, tokens: int, sequences: int, max_new_tokens: int) -> Tensor:
    """Token sum / (sequences x max_new_tokens): the length of an answer does not weigh its tokens."""
    return torch.full_like(lengths, 1.0 / (sequences * max_new_tokens))


# How to add one: write a function with the signature above whose denominators are counts over the whole update (never over the micro-batch), add
# a row under the name a recipe uses, and add the name to the recipe's Literal.
AGGREGATES: dict[str, Aggregate] = {
    "token_mean": Aggregate(function=token_mean, source="DAPO, arXiv:2503.14476", summary="sum over tokens / number of trained tokens"),
    "sequence_mean": Aggregate(function=sequence_mean, source="GRPO, arXiv:2402.03300", summary="mean over sequences of the mean over their tokens"),
    "sequence_sum": Aggregate(function=sequence_sum, source="RLOO, arXiv:2402.14740", summary="mean over sequences of the sum over their tokens"),
    "fixed_length": Aggregate(
        function=fixed_length, source="Dr. GRPO, arXiv:2503.20783", summary="sum over tokens / (sequences x max_new_tokens)"
    ),
}
