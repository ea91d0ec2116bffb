"""Credit per token: rewards of tokens, returns to go, generalised advantage estimation, the critic's loss, whitening in two phases.

Vectors are flat, (N,): the trained tokens of some sequences, sorted by sequence, as in `types.Batch`. What is not trained on (tool output, padding)
is not in them, so "the next token" is the next trained one. Computed in float64, returned in float32; no gradient but in `value_loss`.

What it leaves out: masks, models, other ranks (sums over them are arguments), and whole completions (`advantages`).
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITE_EPS = 1e-8
"""Least variance that whitening divides by."""


def token_rewards(rewards: Tensor, sequence: Tensor, penalties: Tensor | None = None) -> Tensor:
    """(N,) the reward (C,) of each sequence at its last trained token, and everywhere minus the penalty (N,), for example coefficient x KL.

    A reward beyond the last trained token would be lost, on padding or tool output as well as behind the end token.
    """
    found = torch.zeros(sequence.shape, dtype=torch.float64, device=sequence.device)
    if penalties is not None:
        found = found - penalties.detach().double()
    last = _is_last(sequence)
    found[last] += rewards.detach().double()[sequence[last]]
    return found


def returns_to_go(token_rewards: Tensor, sequence: Tensor, *, gamma: float = 1.0) -> Tensor:
    """(N,) G_t = R_t + gamma G_{t+1}, 0 after a sequence's last token."""
    return _discounted(token_rewards.detach().double(), sequence, gamma).float()


def gae(
    token_rewards: Tensor, values: Tensor, sequence: Tensor, bootstrap: Tensor | None = None, *, gamma: float = 1.0, lam: float = 1.0
) -> Tensor:
    """(N,) generalised advantages (arXiv:1506.02438), before whitening: A_t = delta_t + gamma lam A_{t+1}, delta_t = R_t + gamma V_{t+1} - V_t.

    `values` (N,) is V_t, the value before token t. `bootstrap` (C,) is the value after the last token of each sequence, for answers that were cut;
    None: 0 for all. The critic's targets are advantages + values.
    """
    before = values.detach().double()
    last = _is_last(sequence)
    after = torch.cat([before[1:], before.new_zeros(min(1, before.numel()))]).masked_fill(last, 0.0)
    if bootstrap is not None:
        after[last] = bootstrap.detach().double()[sequence[last]]
    return _discounted(token_rewards.detach().double() + gamma * after - before, sequence, gamma * lam).float()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """(N,) 0.5 max((V - R)^2, (clip(V, V_old +- c) - R)^2) (arXiv:1707.06347's code); `clip` None: the first alone. Gradient to `values` only."""
    returns, old = returns.detach(), old_values.detach()
    loss = (values - returns).square()
    if clip is not None:
        loss = torch.maximum(loss, (old + (values - old).clamp(-clip, clip) - returns).square())
    return 0.5 * loss


def white_tokens(values: Tensor, *, mean: float, variance: float) -> Tensor:
    """(N,) (x - mean) rsqrt(max(variance, 1e-8)); mean and population variance over all trained tokens of the step, all ranks."""
    return ((values.double() - mean) * max(variance, WHITE_EPS) ** -0.5).float()


def white_completions(values: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(C,) (x - mean) / (std + eps) over all scored completions of the step; std with the divisor n - 1. Values that are all alike give exactly 0."""
    x = values.detach().double()
    if x.numel() == 0 or x.min() == x.max():
        return torch.zeros_like(x, dtype=torch.float32)  # a mean that misses them by its last bit would be divided by epsilon
    return ((x - x.mean()) / (x.std() + eps)).float()


def _is_last(sequence: Tensor) -> Tensor:
    """(N,) bool: the last token of its sequence."""
    if sequence.numel() == 0:
        return torch.zeros(0, dtype=torch.bool, device=sequence.device)
    return torch.cat([sequence[1:] != sequence[:-1], sequence.new_ones(1, dtype=torch.bool)])


def _discounted(terms: Tensor, sequence: Tensor, factor: float) -> Tensor:
    """(N,) x_t = terms_t + factor x_{t+1} within each sequence: all sequences at once, from their last tokens backwards."""
    if terms.numel() == 0:
        return terms
    _, row, count = torch.unique_consecutive(sequence, return_inverse=True, return_counts=True)
    starts = count.cumsum(0) - count
    from_end = (starts + count - 1)[row] - torch.arange(terms.numel(), device=terms.device)  # 0 at a sequence's last token
    table = terms.new_zeros(count.numel(), int(count.max()))  # (sequences, longest), right to left
    table[row, from_end] = terms
    for column in range(1, table.shape[1]):
        table[:, column] += factor * table[:, column - 1]
    return table[row, from_end]
