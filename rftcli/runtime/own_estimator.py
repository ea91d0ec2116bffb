"""The function of `algorithm.advantage.python`, imported, asked what it takes, and called with a step. Importing it needs no torch of ours.

    def my_estimator(rewards, group, *, power):          # any of RECORD by name, and its options
        return ...                                       # (C,), one finite number for each scored completion, in the order given

It is called once a step, on rank 0, with the completions of all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftcli.errors import RftError, UsageError
from rftcli.runtime.own_function import own_function

RECORD: Mapping[str, str] = {
    "rewards": "(C,) float64",
    "group": "(C,) int64, the draw: completions of one prompt have the same",
    "sample": "(C,) int64, index within the group",
    "lengths": "(C,) int64, trained tokens",
    "parts": "name of a reward part -> (C,) float64, nan where it abstained",
    "weights": "name of a reward part -> (C,) float64",
    "labels": "a list of C labels",
}
"""What the function may ask for; C scored completions of all ranks, by draw and sample. `stages.estimator_inputs` makes it."""


LIMIT = 1e12
"""A larger advantage is an error: advantages become float32, and their squares must fit."""


def load_estimator(target: str, options: Mapping[str, Any], search_path: Sequence[Path]) -> Callable[[Mapping[str, Any]], Sequence[float]]:
    """The function that `module:function` names, looked for in `search_path` first, as an estimator of records. UsageError with what is wrong, also
    where it cannot be called with names of RECORD and these options."""
    function = own_function(target, search_path)
    clash = sorted(set(options) & set(RECORD))
    if clash:
        raise UsageError(f"`{target}`: options {clash} have names that a step's record has")
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    asked = tuple(name for name in RECORD if takes_all or name in parameters)
    try:
        inspect.signature(function).bind(**dict.fromkeys((*asked, *options)))
    except TypeError as error:
        raise UsageError(f"`{target}` cannot be called: {error}", hint=f"it may ask for {', '.join(RECORD)}, and for its `options`") from error

    def estimate(record: Mapping[str, Any]) -> Sequence[float]:
        try:
            found = function(**{name: record[name] for name in asked}, **options)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise RftError(f"algorithm.advantage.python: `{target}` failed: {type(error).__name__}: {error}") from error
        return _numbers(target, found, len(record["rewards"]))

    return estimate


def _numbers(target: str, found: Any, count: int) -> list[float]:
    """One finite number for each completion; RftError for anything else."""
    try:
        values = [float(value) for value in found]  # a list, or a vector of any library
    except (TypeError, ValueError, OverflowError) as error:
        shape = f" of shape {tuple(found.shape)}" if hasattr(found, "shape") else ""
        raise RftError(f"algorithm.advantage.python: `{target}` returned a {type(found).__name__}{shape}, expected {count} numbers") from error
    if len(values) != count:
        raise RftError(f"algorithm.advantage.python: `{target}` returned {len(values)} numbers for {count} scored completions")
    wrong = next((index for index, value in enumerate(values) if not abs(value) <= LIMIT), None)
    if wrong is not None:
        where = f"for completion {wrong} of {count}, expected a finite number of at most {LIMIT:g}"
        raise RftError(f"algorithm.advantage.python: `{target}` returned {values[wrong]} {where}")
    return values
