"""Where the seconds of a step went. Every second since the last step line is accounted for; what no stage claims is `other`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("rft")
STAGES = ("rollout", "score", "credit", "learn", "sync", "eval", "checkpoint")


class Stopwatch:
    """`clock` is passed in by tests. `peak_gib` reads the most memory since it was last read, where a device can tell."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, peak_gib: Callable[[], float] | None = None) -> None:
        self.clock = clock
        self._peak_gib = peak_gib
        self._peaks: dict[str, float] = {}
        self._spent = dict.fromkeys(STAGES, 0.0)
        self._since = clock()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        start = self.clock()
        _log.info("%s", stage)
        try:
            yield
        finally:
            self.add(stage, self.clock() - start)

    def add(self, stage: str, seconds: float) -> None:
        self._spent[stage] += seconds
        if self._peak_gib is not None:
            self._peaks[stage] = max(self._peaks.get(stage, 0.0), self._peak_gib())

    def peaks(self) -> dict[str, float]:
        """GiB of every stage since the last call, at its highest; empty where no device tells. Read at the end of a stage, so `score`, which runs
        beside the rollout, is counted with it."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def lap(self) -> dict[str, float]:
        """Seconds of every stage since the last lap, `other` and `total`; starts the next lap."""
        now = self.clock()
        total = now - self._since
        spent = dict(self._spent)
        self._since = now
        self._spent = dict.fromkeys(STAGES, 0.0)
        return {**spent, "other": max(0.0, total - sum(spent.values())), "total": total}
