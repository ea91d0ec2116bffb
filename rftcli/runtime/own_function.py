"""A function of the user's own in the algorithm: imported from beside the recipe. No torch, so that a recipe is checked before anything heavy loads.

Leaves out what it is called with (`own_loss`, `own_estimator`), and reward functions, which have more ways to go wrong (`rewards.functions`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rftcli.errors import UsageError


def own_function(target: str, search_path: Sequence[Path]) -> Callable[..., Any]:
    """What `module:function` names, looked for in `search_path` first. UsageError with what is wrong."""
    module_name, _, name = target.partition(":")
    folders = [str(Path(folder).resolve()) for folder in search_path]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        where = ", ".join(folders) or "nowhere else"
        raise UsageError(f"`{target}` cannot be imported: {type(error).__name__}: {error}", hint=f"looked in {where} and on PYTHONPATH") from error
    function = vars(module).get(name)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise UsageError(f"`{module_name}` has no function `{name}`", hint=f"functions there: {', '.join(found) or 'none'}")
    return function
