"""Events: one line each, both ways, with torn lines and later attempts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rftcli.events import (
    KINDS,
    CheckpointSaved,
    EvalDone,
    Event,
    Logged,
    Progress,
    RunEnded,
    RunStarted,
    StepDone,
    Warned,
    from_line,
    last_attempts,
    read_events,
    to_line,
)

COMMON = {"time": 1.5, "attempt": 1, "step": 3}
EXAMPLES: list[Event] = [
    RunStarted(**COMMON, info={"name": "x", "ranks": 2}),
    Progress(**COMMON, stage="rollout", done=1, of=4),
    StepDone(**COMMON, metrics={"reward_mean": 0.5, "seconds": {"total": 1.0}}),
    EvalDone(**COMMON, sets={"test": {"mean@1": {"value": 0.5, "low": 0.4, "high": 0.6}}}, seconds=2.0),
    CheckpointSaved(**COMMON, path="checkpoints/step_000003", seconds=0.5),
    Warned(**COMMON, code="silent_zero", text="all rewards are 0"),
    Logged(**COMMON, text="line\nbreak \u2028"),
    RunEnded(**COMMON, status="done"),
]


def test_every_kind_has_an_example() -> None:
    assert {event.kind for event in EXAMPLES} == set(KINDS)


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_round_trip(event: Event) -> None:
    line = to_line(event)
    assert "\n" not in line
    record = json.loads(line)
    assert record["event"] == event.kind and record["step"] == 3
    assert from_line(line) == event


def test_metrics_lie_flat() -> None:
    assert json.loads(to_line(EXAMPLES[2]))["reward_mean"] == 0.5


def test_not_a_number_stays_json() -> None:
    line = to_line(StepDone(**COMMON, metrics={"a": float("nan"), "b": [float("inf"), -float("inf")]}))
    assert json.loads(line)["a"] == "nan" and json.loads(line)["b"] == ["inf", "-inf"]


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(to_line(EXAMPLES[0]) + '\n{"event": "st\n[1]\n{"event": "unknown"}\n' + to_line(EXAMPLES[6]) + "\n" + to_line(EXAMPLES[7])[:20])
    assert [event.kind for event in read_events(path)] == ["start", "log"]


def test_the_last_attempt_of_a_step_wins() -> None:
    def step(attempt: int, number: int) -> StepDone:
        return StepDone(time=0.0, attempt=attempt, step=number, metrics={})

    kept = last_attempts([step(1, 1), step(1, 2), step(1, 3), step(2, 2), step(2, 3), step(2, 4)])
    assert [(event.attempt, event.step) for event in kept] == [(1, 1), (2, 2), (2, 3), (2, 4)]
