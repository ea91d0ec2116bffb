"""Traces of single steps: time with torch.profiler, `attempts/N/profile/rank_0_step_000002.json`, for chrome://tracing or ui.perfetto.dev; or every
allocation of GPU memory, `rank_0_step_000002.pickle`, for pytorch.org/memory_viz.

A traced step is slower, and its own seconds say so. A trace that cannot be written is told and never stops the run.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from rftcli.plan.plan import ProfilePlan
from rftcli.runtime.emit import Emitter
from rftcli.runtime.rundir import AttemptDir, step_name

MOST_ENTRIES = 1_000_000
"""Allocations and frees that are kept of a step; the oldest go."""


class Tracer(Protocol):
    suffix: str

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def write(self, path: Path) -> None: ...


class TimeTracer:
    suffix = "json"

    def __init__(self) -> None:
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
        self._profile = profile(activities=sorted(wanted, key=str), acc_events=True)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def write(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))


class MemoryTracer:
    """What torch's CUDA allocator gave out and took back, each with the Python stack that asked for it. `memory`: torch's module, or what a test
    passes in."""

    suffix = "pickle"

    def __init__(self, memory: Any = torch.cuda.memory) -> None:
        self._memory = memory
        self._snapshot: Any = None

    def start(self) -> None:
        self._memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python")

    def stop(self) -> None:
        self._snapshot = self._memory._snapshot()
        self._memory._record_memory_history(enabled=None)

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            pickle.dump(self._snapshot, file)


class StepProfiler:
    """`tracer` is passed in by tests."""

    def __init__(self, plan: ProfilePlan, attempt: AttemptDir, emit: Emitter, rank: int, *, tracer: Callable[[], Tracer] | None = None) -> None:
        self._steps = frozenset(plan.steps) if plan.ranks == "all" or rank == 0 else frozenset()
        self._folder = attempt.path / "profile"
        self._emit, self._rank = emit, rank
        self._tracer = tracer or TRACERS[plan.tool]
        self._running: Tracer | None = None
        self._step = 0

    def at(self, step: int) -> None:
        """A step begins: whatever was traced is over, and this one is traced if it should be."""
        self.close()
        if step not in self._steps:
            return
        self._running, self._step = self._tracer(), step
        self._running.start()

    def close(self) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        target = self._folder / f"rank_{self._rank}_{step_name(self._step)}.{running.suffix}"
        try:
            self._folder.mkdir(exist_ok=True)
            fresh = target.with_name(f".{target.name}")
            running.write(fresh)
            fresh.replace(target)
        except (OSError, RuntimeError) as error:  # torch reports a file that cannot be opened as either
            self._emit.warn("profile_not_written", f"the trace of step {self._step} could not be written to {target}: {error}")


# How to add one: a class with a suffix, start, stop and write; its name is a value of `profile.tool`.
TRACERS: dict[str, Callable[[], Tracer]] = {"torch": TimeTracer, "memory": MemoryTracer}
