"""How many samples could not be scored, and when that is too many: a run must stop rather than learn from the few that are left.

Leaves out agreement between ranks: give every rank the same counts, and all of them stop at the same step with the same text.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from rftcli.errors import RftError
from rftcli.types import ScoredSample

WINDOW_SAMPLES = 256
FEWEST_SAMPLES = 32
"""A shorter history counts as this many: one failure among the first eight samples is not 12.5%."""
SHOWN = 5
ABSTAINED = "every part with a weight abstained (returned None)"


def count_failures(samples: Iterable[ScoredSample]) -> tuple[int, dict[str, int]]:
    """(number of samples, what happened -> how many of those without a reward). Such a sample counts once, with its first error."""
    total, failures = 0, Counter[str]()
    for sample in samples:
        total += 1
        if sample.reward is None and sample.shaped is None:  # a masked one could be scored
            own = [f"{part.name}: {part.error}" for part in sample.parts if part.error is not None and part.weight]
            failures[next(iter([*own, *([] if sample.error is None else [sample.error])]), ABSTAINED)] += 1
    return total, dict(failures)


class ErrorWindow:
    """The newest steps that hold at least `window` samples. Remembers; part of a checkpoint."""

    def __init__(self, max_error_rate: float, window: int = WINDOW_SAMPLES) -> None:
        self._max_error_rate, self._window = max_error_rate, window
        self._steps: deque[tuple[int, dict[str, int]]] = deque()

    def add(self, total: int, failures: Mapping[str, int]) -> None:
        """Counts of one step, over all ranks. RftError, with the distinct errors and how often each came, if samples without a reward are more
        than `max_error_rate` of the window."""
        self._steps.append((total, dict(failures)))
        while sum(total for total, _ in self._steps) - self._steps[0][0] >= self._window:
            self._steps.popleft()
        samples = sum(total for total, _ in self._steps)
        errors = sum((Counter(failures) for _, failures in self._steps), Counter[str]())
        failed = errors.total()
        if failed > self._max_error_rate * max(samples, FEWEST_SAMPLES):
            raise RftError(
                f"{failed} of the last {samples} samples could not be scored, more than reward_shaping.max_error_rate {self._max_error_rate:g} allows"
                + "".join(f"\n  {count} x {text}" for text, count in errors.most_common(SHOWN))
                + (f"\n  and {len(errors) - SHOWN} other errors" if len(errors) > SHOWN else ""),
                hint="the last file in the run's `samples/` holds texts, rewards and errors; `on_error: abstain` leaves a failing part out",
            )

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": [[total, dict(failures)] for total, failures in self._steps]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = deque((int(total), {str(text): int(count) for text, count in failures.items()}) for total, failures in state["steps"])
