"""Ends a run that does not get better (`train.early_stop`) or has had its tokens (`train.max_tokens`). Part of every checkpoint, so
that a resumed run counts on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rftcli.errors import RftError
from rftcli.observe.numbers import flatten, flatten_evals
from rftcli.plan.plan import EarlyStopPlan
from rftcli.protocols import World

SHOWN_NAMES = 12


@dataclass(slots=True, kw_only=True)
class EarlyStop:
    """`plan` None: no metric is watched; `max_tokens` None: any number of them."""

    plan: EarlyStopPlan | None
    world: World
    max_tokens: int | None = None
    best: float | None = None
    best_step: int = 0
    stalled: int = 0
    """Values in a row that were not better than the best."""
    last_step: int = 0
    """Step of the newest value."""
    tokens: int = 0
    """Of all steps so far."""

    def see_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of a step. Collective where the plan watches one of them."""
        self.tokens = int(metrics.get("tokens_total", self.tokens))
        if self.plan is not None and not self.plan.metric.startswith("eval."):
            self._see(step, flatten(metrics, "."))

    def see_eval(self, step: int, sets: Mapping[str, Mapping[str, Any]]) -> None:
        """Results of an evaluation. Collective where the plan watches one of them."""
        if self.plan is not None and self.plan.metric.startswith("eval."):
            self._see(step, {f"eval.{name}": value for name, value in flatten_evals(sets, ".").items()})

    @property
    def reached(self) -> bool:
        return self._stalled or (self.max_tokens is not None and self.tokens >= self.max_tokens)

    @property
    def _stalled(self) -> bool:
        return self.plan is not None and self.stalled >= self.plan.patience

    @property
    def cause(self) -> str | None:
        """Why the run ended; None: it did not because of this."""
        if not self.reached:
            return None
        if not self._stalled:
            return f"stopped early: {self.tokens} tokens, train.max_tokens is {self.max_tokens}"
        assert self.plan is not None
        best = "it never had a value" if self.best is None else f"best {self.best:.4g} at step {self.best_step}"
        unit = "evaluations" if self.plan.metric.startswith("eval.") else "steps"
        return f"stopped early: {self.plan.metric} has not got better for {self.stalled} {unit} ({best})"

    def _see(self, step: int, values: Mapping[str, float]) -> None:
        """A value that is missing or no number is none that is better. Raises RftError, on every rank alike, for a name that never existed."""
        assert self.plan is not None
        value = self.world.gather(values.get(self.plan.metric))[0]  # what rank 0 has counts for all
        if value is None and self.best is None and self.last_step == 0 and step > 0:
            known = sorted(values)
            shown = ", ".join(known[:SHOWN_NAMES]) + (f" and {len(known) - SHOWN_NAMES} more" if len(known) > SHOWN_NAMES else "")
            raise RftError(f"train.early_stop.metric: step {step} has no metric `{self.plan.metric}`", hint=f"there are: {shown}")
        self.last_step = step
        if value is not None and math.isfinite(value) and self._better(value):
            self.best, self.best_step, self.stalled = value, step, 0
        elif self.best is not None or value is not None:
            self.stalled += 1

    def _better(self, value: float) -> bool:
        assert self.plan is not None
        if self.best is None:
            return True
        gain = value - self.best if self.plan.mode == "max" else self.best - value
        return gain > self.plan.min_delta

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "stalled": self.stalled, "last_step": self.last_step, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = None if state["best"] is None else float(state["best"])
        self.best_step, self.stalled, self.last_step = int(state["best_step"]), int(state["stalled"]), int(state["last_step"])
        self.tokens = int(state.get("tokens", 0))  # an older checkpoint has none
