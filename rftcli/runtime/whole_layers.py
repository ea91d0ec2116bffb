"""Under ZeRO-3 a layer of the model is gathered as one, not linear by linear: fewer collectives, and fewer hooks for the host to run."""

from __future__ import annotations

from typing import Any

from deepspeed.utils import set_z3_leaf_modules


def gather_whole_layers(module: Any) -> int:
    """Before `deepspeed.initialize`. Layers are what transformers would keep together on one device (`_no_split_modules`); how many were found.

    Not where some weights are trained and others are not: DeepSpeed then gives a layer back before its backward pass is through.
    """
    if len({parameter.requires_grad for parameter in module.parameters()}) > 1:
        return 0
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return len(set_z3_leaf_modules(module, sorted(names), raise_if_not_found=False)) if names else 0
