"""Which rows are passed over when their turn comes: by the pass rate that training measured, or as a class of the user's says.

The order of the data stays as it is; a curriculum only leaves rows out of it. So the source's position says all about where a run is, and what was
measured is in the checkpoint. Every rank asks and tells the same, so all of them leave the same rows out. Leaves out prompts and rewards.

A class of the user's, `data.curriculum.python: module:Class`, is made with `options` and has

    takes(row, turn) -> bool            # row.source, row.index, row.id, row.label, row.prompt, row.reference, row.columns
    after_step(step, groups)            # each with source, row, row_id, label, rewards: a tuple, None where a completion could not be scored
    state_dict() -> a mapping that goes through JSON;  load_state_dict(state)

It must depend on nothing but its arguments and what it was told: it runs on every rank.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rftcli.algo.keyed import key64
from rftcli.data.files import called
from rftcli.data.rows import Row
from rftcli.errors import ResumeError, RftError, UsageError

OWN_METHODS = ("takes", "after_step", "state_dict", "load_state_dict")


class Measured(Protocol):
    """A group that was sampled and scored (`stages.outcomes.Outcome`)."""

    @property
    def source(self) -> str: ...

    @property
    def row(self) -> int: ...

    @property
    def values(self) -> tuple[float | None, ...]: ...


class PassRates:
    """Rows whose pass rate is known and outside [low, high] are passed over, but for a keyed share of them. Unknown rows are always drawn.

    `data` is the fingerprint of the rows that the rates belong to. A rate is a running mean: memory x before + (1 - memory) x newest.
    """

    def __init__(
        self, *, low: float, high: float, share: float, metric: str, pass_mark: float, memory: float, seed: int, data: str
    ) -> None:
        self.metric = metric
        self.rates: dict[str, float] = {}
        """`source:row` -> pass rate."""
        self._low, self._high, self._share = low, high, share
        self._pass_mark, self._memory = pass_mark, memory
        self._seed, self._data = seed, data

    def takes(self, row: Row, turn: int) -> bool:
        rate = self.rates.get(f"{row.source}:{row.index}")
        if rate is None or self._inside(rate):
            return True
        return key64("curriculum", self._seed, turn) < self._share * 2**64

    def after(self, step: int, outcomes: Sequence[Measured]) -> None:
        """Measure: the share of a group's completions with a value that pass. A group without any says nothing."""
        for outcome in outcomes:
            values = [value for value in outcome.values if value is not None]
            if not values:
                continue
            key, newest = f"{outcome.source}:{outcome.row}", sum(value >= self._pass_mark for value in values) / len(values)
            before = self.rates.get(key)
            self.rates[key] = newest if before is None else self._memory * before + (1.0 - self._memory) * newest

    def metrics(self) -> Mapping[str, float]:
        if not self.rates:
            return {"rows_measured": 0}
        count = len(self.rates)
        inside = sum(map(self._inside, self.rates.values()))
        return {"rows_measured": count, "pass_rate": sum(self.rates.values()) / count, "inside_fraction": inside / count}

    def state_dict(self) -> Mapping[str, Any]:
        return {"data": self._data, "rates": dict(self.rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ResumeError if the rates were measured on other data."""
        if state["data"] != self._data:
            raise ResumeError("the pass rates were measured on other rows", hint="let them start anew: `rft resume RUN_DIR --accept`")
        self.rates = {str(key): float(rate) for key, rate in state["rates"].items()}

    def _inside(self, rate: float) -> bool:
        return self._low <= rate <= self._high


class OwnCurriculum:
    """A class of the user's. UsageError if it cannot be made or lacks a method; RftError for what it raises while the run goes on."""

    metric = "reward"

    def __init__(self, target: str, options: Mapping[str, Any], search_path: Sequence[Path]) -> None:
        self._target = target
        self._own: Any = called(target, options, search_path)
        lacking = [name for name in OWN_METHODS if not callable(inspect.getattr_static(self._own, name, None))]
        if lacking:
            raise UsageError(f"data.curriculum: `{target}` has no method `{lacking[0]}`", hint=f"it needs {', '.join(OWN_METHODS)}")
        self.state_dict()  # what no checkpoint could hold is told now, and not at the first of them

    def takes(self, row: Row, turn: int) -> bool:
        taken = self._call("takes", row, turn)
        if taken is None:
            raise RftError(f"data.curriculum: `{self._target}`.takes returned None, expected True or False", hint="a forgotten return?")
        return bool(taken)

    def after(self, step: int, outcomes: Sequence[Measured]) -> None:
        self._call("after_step", step, list(outcomes))

    def metrics(self) -> Mapping[str, float]:
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        state = self._call("state_dict")
        try:
            return {"own": json.loads(json.dumps(dict(state), allow_nan=False))}
        except (TypeError, ValueError, RecursionError) as error:
            message = f"data.curriculum: `{self._target}`.state_dict returned what JSON cannot hold: {type(error).__name__}: {error}"
            raise RftError(message, hint="a mapping of numbers, texts, lists and mappings, without nan") from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call("load_state_dict", state["own"])

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._own, name)(*arguments)
        except (Exception, SystemExit) as error:  # code of the user: whatever it raises is its author's to read
            raise RftError(f"data.curriculum: `{self._target}`.{name} failed with {type(error).__name__}: {error}") from error
