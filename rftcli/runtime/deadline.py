"""Stops and saves by the clock: `train.max_hours`, a scheduler's deadline, `checkpoint.every_minutes`. Rank 0's clock decides for all ranks.

A run stops while one more step and its checkpoint, as long as those it has measured, might still reach over the limit: so it stops before it, with
everything saved. At least one step is done in every attempt. Leaves out asking the ranks to stop by a signal (`launch`). No torch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rftcli.errors import UsageError
from rftcli.plan.plan import CheckpointPlan

DEADLINES = ("RFT_DEADLINE", "SLURM_JOB_END_TIME")
"""Environment variables that hold the end of the allocation in seconds since the epoch; the first that is set counts."""
RECENT = 5
"""Steps and checkpoints that the next ones are expected to be like: the slowest of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What is due at the end of a step. `stop`: interrupt, terminate, deadline or max_hours; None goes on."""

    save: bool
    stop: str | None


def announced(environment: Mapping[str, str]) -> float | None:
    """The scheduler's deadline in seconds since the epoch; None when there is none. UsageError for a text that is no number."""
    for name in DEADLINES:
        text = environment.get(name, "").strip()
        if text:
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                hint = f"for example {name}=$(date -d '+2 hours' +%s)"
                raise UsageError(f"{name} is {text!r}, which is no time in seconds since the epoch", hint=hint)
            return value
    return None


class TimeLimits:
    """`started`: when the attempt began, `deadline`: both in seconds since the epoch. `clock` is passed in by tests."""

    def __init__(
        self,
        plan: CheckpointPlan,
        max_hours: float | None,
        *,
        started: float | None = None,
        deadline: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._margin = plan.deadline_margin_seconds
        self._deadline = deadline if plan.before_deadline else None
        self._every_seconds = None if plan.every_minutes is None else 60.0 * plan.every_minutes
        now = clock()
        self._end = None if max_hours is None else (now if started is None else started) + 3600.0 * max_hours
        self._saved_at = self._step_began = now
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._saves: deque[float] = deque(maxlen=RECENT)

    def step_over(self, asked: str | None) -> Boundary:
        """What is due now that a step is done; `asked`: the reason of a signal, which comes first."""
        now = self._clock()
        self._steps.append(now - self._step_began)
        self._step_began = now
        if asked is not None:
            return Boundary(save=True, stop=asked)
        next_step = max(self._steps)
        expected = now + next_step + max(self._saves, default=next_step)
        if self._deadline is not None and expected + self._margin >= self._deadline:
            return Boundary(save=True, stop="deadline")
        if self._end is not None and expected >= self._end:
            return Boundary(save=True, stop="max_hours")
        return Boundary(save=self._every_seconds is not None and now - self._saved_at >= self._every_seconds, stop=None)

    def saved(self, seconds: float, *, behind: bool = False) -> None:
        """A checkpoint was committed just now, in so many seconds; `behind` a step that has begun since it was copied."""
        self._saves.append(seconds)
        if not behind:
            self.copied()

    def copied(self) -> None:
        """What a checkpoint holds was copied just now: the next step begins, and minutes are counted from here."""
        self._saved_at = self._step_began = self._clock()
