"""Traces of single steps: which steps, whose, under which name, and a trace that cannot be written."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from rftcli.plan.plan_run import ProfilePlan
from rftcli.recipe.kinds import keys
from rftcli.runtime.profiler import TRACERS, MemoryTracer, StepProfiler
from rftcli.runtime.rundir import AttemptDir, RunDir


class Told:
    def __init__(self) -> None:
        self.warnings: list[tuple[str, str]] = []

    def warn(self, code: str, text: str) -> None:
        self.warnings.append((code, text))


class Recorded:
    """A tracer that says what it was asked for."""

    suffix = "txt"
    calls: list[str]

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def write(self, path: Path) -> None:
        path.write_text("trace")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    run = RunDir(tmp_path / "run")
    run.create()
    made = run.attempt(1)
    made.create()
    return made


def profiler(attempt: AttemptDir, told: Any, calls: list[str], rank: int = 0, **plan: Any) -> StepProfiler:
    return StepProfiler(ProfilePlan(**plan), attempt, told, rank, tracer=lambda: Recorded(calls))


def test_the_steps_that_are_asked_for(attempt: AttemptDir) -> None:
    calls: list[str] = []
    found = profiler(attempt, Told(), calls, steps=(2, 3))
    for step in (1, 2, 3, 4):
        found.at(step)
    found.close()
    assert calls == ["start", "stop"] * 2
    assert sorted(path.name for path in (attempt.path / "profile").iterdir()) == ["rank_0_step_000002.txt", "rank_0_step_000003.txt"]


@pytest.mark.parametrize(("ranks", "traced"), [("first", []), ("all", ["start", "stop"])])
def test_whose_steps(attempt: AttemptDir, ranks: str, traced: list[str]) -> None:
    calls: list[str] = []
    found = profiler(attempt, Told(), calls, rank=1, steps=(1,), ranks=ranks)
    found.at(1)
    found.close()
    assert calls == traced


def test_a_trace_that_cannot_be_written_is_told(attempt: AttemptDir) -> None:
    told = Told()
    (attempt.path / "profile").write_text("in the way")
    found = profiler(attempt, told, [], steps=(1,))
    found.at(1)
    found.close()
    assert [code for code, _ in told.warnings] == ["profile_not_written"]


def test_a_chrome_trace(attempt: AttemptDir) -> None:
    found = StepProfiler(ProfilePlan(steps=(1,), tool="torch"), attempt, Told(), 0)  # type: ignore[arg-type]
    found.at(1)
    torch.ones(3).sum()
    found.close()
    assert json.loads((attempt.path / "profile" / "rank_0_step_000001.json").read_text())["traceEvents"]


class Allocator:
    """torch.cuda.memory, as far as a history goes: a snapshot holds what was recorded up to it."""

    def __init__(self) -> None:
        self.recording = False

    def _record_memory_history(self, enabled: str | None = "all", **options: Any) -> None:
        self.recording = enabled is not None

    def _snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": [["an allocation"] if self.recording else []]}


def test_a_history_of_memory_is_read_before_it_is_switched_off(tmp_path: Path) -> None:
    allocator = Allocator()
    tracer = MemoryTracer(allocator)
    tracer.start()
    tracer.stop()
    tracer.write(tmp_path / "x.pickle")
    assert pickle.loads((tmp_path / "x.pickle").read_bytes())["device_traces"] == [["an allocation"]] and not allocator.recording


def test_the_language_knows_every_tool() -> None:
    (kind,) = [key.kind for key in keys() if key.pattern == "profile.tool"]
    assert set(kind.choices) == set(TRACERS)
