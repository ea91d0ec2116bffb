"""Which way a head's scores are read: plain torch, or the Triton kernels where they run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from rftcli.algo.logprobs import plain_logprobs

Reader = Callable[..., tuple[Tensor, Tensor]]
"""`plain_logprobs`, or what gives the same."""

CLOSE = 1e-3
"""Nats that two ways may differ by, of scores in float32."""


def reader(fused: bool) -> Reader:
    """The kernels, or plain torch."""
    kernels: Reader = import_module("rftcli.models.score_kernels").fused_logprobs if fused else plain_logprobs
    return kernels


def positions_at_once(dtype: torch.dtype, fused: bool) -> int:
    """How many times as many positions fit as plain torch can have: it holds copies of the scores in float32, the kernels the scores and their
    gradient alone."""
    if not fused:
        return 1
    return 2 if dtype == torch.float32 else 4


def kernels_work(device: torch.device) -> str | None:
    """None where the kernels run on this device and say what plain torch says; else the reason. They are compiled at the first call, in seconds."""
    if device.type != "cuda":
        return "no GPU"
    scores = torch.linspace(-4.0, 4.0, 3 * 5000, device=device).reshape(3, 5000)
    targets = torch.tensor([0, 77, 4999], device=device)
    try:
        found, expected = reader(True)(scores, targets, 0.7), plain_logprobs(scores, targets, 0.7)
    except Exception as error:  # no Triton, no compiler, a card that it does not know: whatever is missing, there is another way
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    gap = max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))
    return None if gap <= CLOSE else f"they differ from plain torch by {gap:.3g} nats"
