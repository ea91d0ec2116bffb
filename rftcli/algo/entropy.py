"""The entropy bonus: its coefficient from update to update, and which tokens have the most entropy.

What it leaves out: entropies themselves (`logprobs`) and adding them to a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def next_coefficient(coefficient: float, entropy: float, *, target: float, delta: float, low: float, high: float) -> float:
    """The coefficient after an update of mean entropy `entropy` (arXiv:2505.22312): up by delta at or below the target, else down.

    It stays within [low, high]. An entropy that is not a number changes nothing.
    """
    assert delta >= 0 and low <= high, (delta, low, high)
    if math.isnan(entropy):
        return coefficient
    return min(high, max(low, coefficient + (delta if entropy <= target else -delta)))


def count_kept(share: float, tokens: int) -> int:
    """ceil(share N): how many of N tokens are kept, never none. A product that misses a whole number by its last bit counts as that number.

    >>> count_kept(0.2, 10), count_kept(0.2, 11), count_kept(0.07, 100), count_kept(0.2, 1)
    (2, 3, 7, 1)
    """
    return max(1, math.ceil(share * tokens - 1e-9))


def largest(values: Tensor, count: int, total: Callable[[Sequence[float]], Sequence[float]]) -> Tensor:
    """(N,) bool: which float32 values are among the `count` largest of all ranks' values; what ties with the last of them is too.

    `total` sums a list over ranks. Exact on any number of ranks: the bits of the last one are found eight at a time, from four summed histograms.
    """
    assert values.dtype == torch.float32 and count >= 1, (values.dtype, count)
    bits = (values.detach().cpu() + 0.0).view(torch.int32).long() & 0xFFFFFFFF  # -0 is 0
    order = torch.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)  # as unsigned numbers they sort like the floats
    found, missing = 0, count
    for shift in (24, 16, 8, 0):
        alike = order[(order >> shift) >> 8 == found]
        counts = [int(number) for number in total(torch.bincount((alike >> shift) & 0xFF, minlength=256).tolist())]
        digit = 255
        while digit > 0 and counts[digit] < missing:
            missing -= counts[digit]
            digit -= 1
        found = found << 8 | digit
    return order >= found
