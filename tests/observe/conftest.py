"""Events and run directories for the tests of observers."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rftcli.events import Event, StepDone, to_line


@pytest.fixture
def append_events() -> Callable[[Path, Iterable[Event]], None]:
    def append(run_dir: Path, events: Iterable[Event]) -> None:
        with (run_dir / "events.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(to_line(event) + "\n" for event in events)

    return append


@pytest.fixture
def step_done() -> Callable[..., StepDone]:
    """A step of 10 seconds with the metrics given."""

    def make(step: int, attempt: int = 1, **metrics: Any) -> StepDone:
        return StepDone(time=1000.0 * attempt + 10.0 * step, attempt=attempt, step=step, metrics=metrics)

    return make


@pytest.fixture
def write_samples() -> Callable[[Path, int, Iterable[Mapping[str, Any]]], None]:
    def write(run_dir: Path, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        path = run_dir / "samples" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples), encoding="utf-8")

    return write
