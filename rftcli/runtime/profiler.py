"""Traces of single steps with torch.profiler: `attempts/N/profile/rank_0_step_000002.json`, for chrome://tracing or ui.perfetto.dev.

A traced step is slower, and its own seconds say so. A trace that cannot be written is told and never stops the run.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile, supported_activities

from rftcli.plan.plan import ProfilePlan
from rftcli.runtime.emit import Emitter
from rftcli.runtime.rundir import AttemptDir, step_name


class StepProfiler:
    def __init__(self, plan: ProfilePlan, attempt: AttemptDir, emit: Emitter, rank: int) -> None:
        self._steps = frozenset(plan.steps) if plan.ranks == "all" or rank == 0 else frozenset()
        self._folder = attempt.path / "profile"
        self._emit, self._rank = emit, rank
        self._running: Any = None
        self._step = 0

    def at(self, step: int) -> None:
        """A step begins: whatever was traced is over, and this one is traced if it should be."""
        self.close()
        if step not in self._steps:
            return
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
        self._running, self._step = profile(activities=sorted(wanted, key=str), acc_events=True), step
        self._running.start()

    def close(self) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        target = self._folder / f"rank_{self._rank}_{step_name(self._step)}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            fresh = target.with_name(f".{target.name}")
            running.export_chrome_trace(str(fresh))
            fresh.replace(target)
        except (OSError, RuntimeError) as error:  # torch reports a file that cannot be opened as either
            self._emit.warn("profile_not_written", f"the trace of step {self._step} could not be written to {target}: {error}")
