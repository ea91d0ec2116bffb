"""Parameters that are not trained, by shell patterns over their whole names.

What it leaves out: adapters, which freeze everything else by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from rftcli.errors import UsageError


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[int, int]:
    """(tensors, parameters) that are frozen now. UsageError for a pattern without a match, and when nothing would be left to train.

    A tied weight has one name, that of its first owner: usually the input embedding.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            some = ", ".join(list(named)[:3])
            raise UsageError(f"models.policy.freeze: `{pattern}` matches no parameter", hint=f"the model's names are like {some}")
    frozen = [parameter for name, parameter in named.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if len(frozen) == len(named):
        raise UsageError("models.policy.freeze freezes all parameters: nothing is left to train")
    for parameter in frozen:
        parameter.requires_grad_(False)
    return len(frozen), sum(parameter.numel() for parameter in frozen)
