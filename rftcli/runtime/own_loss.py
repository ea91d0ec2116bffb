"""The function of `algorithm.loss.python`, imported and asked what it takes. No torch, so that a recipe can be checked before anything heavy loads.

    def my_loss(new, old, advantages, *, beta, sequence, num_sequences):     # the last two only if it wants them
        return -advantages * new + beta * (new - old) ** 2                   # (N,), one value a trained token

Leaves out calling it (`algo.own_loss`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rftcli.errors import UsageError
from rftcli.runtime.own_function import own_function

ARGUMENTS = ("new", "old", "advantages")
ON_REQUEST = ("sequence", "num_sequences")


class OwnFunction(NamedTuple):
    """`asks`: which of ON_REQUEST it takes by name."""

    function: Callable[..., Any]
    asks: tuple[str, ...]


def load_loss(target: str, options: Mapping[str, Any], search_path: Sequence[Path]) -> OwnFunction:
    """The function that `module:function` names, looked for in `search_path` first. UsageError with what is wrong, also where it cannot be called
    with (new, old, advantages) and these options."""
    function = own_function(target, search_path)
    signature = inspect.signature(function)
    asks = tuple(key for key in ON_REQUEST if key in signature.parameters)
    try:
        signature.bind(*ARGUMENTS, **dict.fromkeys((*asks, *options)))
    except TypeError as error:
        raise UsageError(
            f"`{target}` cannot be called with ({', '.join(ARGUMENTS)}) and {', '.join((*asks, *options)) or 'no options'}: {error}",
            hint="its further parameters come from algorithm.loss.options, or are sequence and num_sequences",
        ) from error
    return OwnFunction(function, asks)
