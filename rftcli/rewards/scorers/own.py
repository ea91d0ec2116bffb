"""A scorer of the user's own, `python: module:Class`: it may hold a model on the rank's device.

    class Mine:
        def __init__(self, device, **options): ...     # once a rank; `options` are those of the recipe
        def score(self, batch): ...                     # a list of records -> as many numbers
        def close(self): ...                            # optional

A record has prompt, messages, completion, reference, label and columns. All rows of a rank come in one call, after the rollout.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rftcli.errors import UsageError
from rftcli.rewards.functions import as_number, close_own, describe, load_object
from rftcli.rewards.scorers.view import View, canonical

FIELDS = ("prompt", "messages", "completion", "reference", "label", "columns")


def scorer_class(target: str, search_path: Iterable[Path | str] = ()) -> type:
    """UsageError where `target` names no class with a method `score`."""
    found = load_object(target, search_path)
    if not inspect.isclass(found) or not callable(inspect.getattr_static(found, "score", None)):
        raise UsageError(f"`{target}` must be a class with a method `score(self, batch)`", hint="`rft explain models.scorers.NAME.python`")
    return found


class OwnScorer:
    """UsageError for a class that cannot be constructed."""

    remote: Literal[False] = False
    collective = False

    def __init__(self, target: str, options: Mapping[str, Any], device: Any, search_path: Iterable[Path | str] = ()) -> None:
        cls = scorer_class(target, search_path)
        self._target = target
        try:
            self._scorer: Any = cls(device, **options)
        except (Exception, SystemExit) as error:  # code of the user: whatever it raises is its author's to read
            raise UsageError(f"`{target}` cannot be constructed: {describe(error)}") from error

    def key(self, view: View) -> str:
        return canonical([getattr(view, name) for name in FIELDS])

    def score(self, views: Sequence[View]) -> list[float | Exception]:
        """A number or an error for each; what the class raises is an error of every row."""
        if not views:
            return []
        records = [{name: getattr(view, name) for name in FIELDS} for view in views]
        try:
            found = self._scorer.score(records)
            values = list(found.tolist() if callable(getattr(found, "tolist", None)) else found)
        except (Exception, SystemExit) as error:
            return [ValueError(f"{self._target}: {describe(error)}")] * len(views)
        if len(values) != len(views):
            return [ValueError(f"{self._target} returned {len(values)} values for {len(views)} rows")] * len(views)
        return [self._checked(value) for value in values]

    def _checked(self, value: Any) -> float | Exception:
        try:
            number = as_number(self._target, value)
        except (TypeError, ValueError) as error:
            return error
        return ValueError(f"{self._target} returned None for a row") if number is None else number

    def close(self) -> None:
        close_own(self._target, self._scorer)
