"""What runs inside SGLang's own processes: it is named to them as a custom weight loader, the door that SGLang has for a function of the caller's.

It loads nothing. What it leaves out: weights, which come by SGLang's own loaders (`sglang_weights`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rftcli.engines.weights import Sums

NAME = f"{__name__}.tell_sum"
"""As SGLang is told it."""


@torch.no_grad()
def tell_sum(model: nn.Module, tensors: list[tuple[str, Tensor]]) -> None:
    """Write the sum of the bits of all of `model`'s numbers into the one tensor that came, which shares its memory with the trainer's process."""
    ((_, place),) = tensors
    place.fill_(signed(held_by(model).total))


def held_by(model: nn.Module) -> Sums:
    """Every parameter once, as the engine computes with it."""
    held = Sums()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            held.add(name, parameter)
    return held


def signed(total: int) -> int:
    """A number modulo 2^64 as int64 has it."""
    return total - 2**64 if total >= 2**63 else total
