"""How fast a step was: tokens a second, and the share of the device's arithmetic that it used.

What it leaves out: where the seconds went (`clock`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

FLOPS_A_PARAMETER = 6
"""Floating-point operations for each parameter and token: 2 forward, 4 backward (arXiv:2001.08361). Recomputed and skipped passes count as none, and
generation is free, so that no choice of method can raise the figure but a shorter step."""


def card_of(device: torch.device) -> str | None:
    """The name that torch gives a GPU; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def speed_metrics(*, tokens: int, passed: float, seconds: float, ranks: int, parameters: int, card: str | None) -> Mapping[str, float]:
    """`tokens` of the step, prompts and answers, on all ranks; `passed` through the update, which alone count for `mfu`. Metrics of the step event;
    none on a CPU, and no mfu for an unknown card.

    >>> speed_metrics(tokens=1_000_000, passed=1_000_000, seconds=10.0, ranks=2, parameters=1_000_000_000, card="NVIDIA H200")
    {'tokens_per_second_per_gpu': 50000.0, 'mfu': 0.303...}
    """
    if card is None or seconds <= 0:
        return {}
    each = tokens / seconds / ranks
    peak = peak_flops(card)
    return {"tokens_per_second_per_gpu": each} | ({} if peak is None else {"mfu": mfu(passed / seconds / ranks, parameters, peak)})


def mfu(tokens_per_second: float, parameters: int, peak: float) -> float:
    """
    >>> mfu(20_000, 1_500_000_000, 989e12)
    0.182...
    """
    return FLOPS_A_PARAMETER * parameters * tokens_per_second / peak


def peak_flops(name: str) -> float | None:
    """Floating-point operations a second of a card, by a part of its name; the first row that fits.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe"), peak_flops("Voodoo 2")
    (989000000000000.0, 756000000000000.0, None)
    """
    return next((teraflops * 1e12 for part, teraflops in TERAFLOPS if part in name), None)


# How to add one: (part of the name that torch gives the card, dense bfloat16 teraflops of its data sheet), before any row whose part is in it too.
TERAFLOPS = (
    ("GB200", 2500), ("B300", 2250), ("B200", 2250), ("GH200", 989), ("H200", 989), ("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989),
    ("H800", 989),
    ("H20", 148), ("A100", 312), ("A800", 312), ("A40", 150), ("A30", 165), ("A10G", 70), ("A10", 125), ("L40S", 362), ("L40", 181), ("L4", 121),
    ("RTX PRO 6000", 504), ("RTX 6000 Ada", 364), ("RTX 5090", 210), ("RTX 4090", 165), ("RTX 3090", 71), ("RTX A6000", 155),
)  # fmt: skip
