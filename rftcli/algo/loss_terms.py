"""What every policy loss returns, and sums over the tokens of a sequence.

What it leaves out: the losses themselves (`token_losses`, `sequence_losses`, `cov_losses`) and how terms are added up (`reduce`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What a loss says about each of the N trained tokens of a micro-batch."""

    loss: Tensor
    """(N,) to be minimised. A loss with one term a sequence repeats it at each of the sequence's tokens, so that the mean over sequences of token
    means is the mean of the terms."""
    ratio: Tensor
    """(N,) new over old probability as the loss reads it: of the token, or of its sequence. Without gradient."""
    clipped_low: Tensor | None = None
    """(N,) bool: A < 0, and the lower bound takes the gradient away (cispo: bounds the weight). None: the loss has no such bound."""
    clipped_high: Tensor | None = None
    """(N,) bool: A > 0, and the upper bound does."""


def per_sequence(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """(num_sequences,) sums of values (N,) over the trained tokens of each sequence; 0 for one without any."""
    return torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add(0, sequence, values)


def sequence_means(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """(num_sequences,) means of values (N,) over the trained tokens of each sequence; 0 for one without any."""
    lengths = torch.bincount(sequence, minlength=num_sequences).clamp(min=1)
    return per_sequence(values, sequence, num_sequences) / lengths
