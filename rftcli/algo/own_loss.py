"""A policy loss of the user's own: a function of tensors, checked where it is called.

What it leaves out: importing it (the runtime does), and aggregation, which is the recipe's as for any other loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rftcli.algo.kl import log_ratio
from rftcli.algo.loss_terms import LossTerms
from rftcli.errors import RftError


def own_loss(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    sequence: Tensor,
    num_sequences: int,
    function: Callable[..., Any],
    asks: tuple[str, ...] = (),
    own_options: Mapping[str, Any] | None = None,
) -> LossTerms:
    """`function(new, old, advantages, **own_options)` -> (N,) loss of each trained token, or LossTerms. `asks`: which of sequence and num_sequences
    it takes by name.

    RftError when it fails, and when what comes back is no loss per token, or has no gradient.
    """
    known = {"sequence": sequence, "num_sequences": num_sequences}
    copies = (new.clone(), old.detach().clone(), advantages.detach().clone())  # a function may write into what it was given
    try:
        found = function(*copies, **{name: known[name] for name in asks}, **(own_options or {}))
    except (Exception, SystemExit) as error:  # code of the user: whatever it raises is its author's to read
        if isinstance(error, MemoryError) or "memory" in str(error):  # told by what the run was doing
            raise
        raise RftError(f"the loss of algorithm.loss.python failed: {type(error).__name__}: {error}") from error
    terms = found if isinstance(found, LossTerms) else LossTerms(loss=found, ratio=log_ratio(new.detach(), old.detach()).exp())
    if not isinstance(terms.loss, torch.Tensor) or terms.loss.shape != new.shape:
        shape = tuple(terms.loss.shape) if isinstance(terms.loss, torch.Tensor) else type(terms.loss).__name__
        raise RftError(
            f"the loss of algorithm.loss.python returned {shape} for {new.numel()} trained tokens",
            hint="it returns one value a token, before any mean: the recipe's aggregate adds them up over the whole update",
        )
    if new.requires_grad and new.numel() and not terms.loss.requires_grad:
        raise RftError(
            "the loss of algorithm.loss.python has no gradient: nothing would be learnt",
            hint="it has to be made of `new`, without `detach()`, `.item()` or `torch.no_grad()`",
        )
    return terms
