"""What happened, as records that go both ways through JSON: the one channel from a run to everything that watches it.

Rank 0 appends one JSON object a line to `events.jsonl`. Every line has `event`, `time` (seconds since the epoch), `attempt` and `step`; readers
keep the last attempt of a step (`last_attempts`). A torn last line (a writer killed in the middle) is ignored.
A metric that does not apply is absent, never 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    time: float
    attempt: int
    step: int
    kind: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """`info`: name, ranks, device, engine, steps, parameters, first step, ... whatever a header shows."""

    info: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """At most one every two seconds."""

    stage: str
    done: int
    of: int
    kind: ClassVar[str] = "progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """`metrics` are laid flat into the line: reward_mean, kl, seconds {...}, ..."""

    metrics: Mapping[str, Any]
    kind: ClassVar[str] = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDone(Event):
    """`sets`: name -> {"mean@1": {"value": 0.5, "low": 0.4, "high": 0.6}, "prompts": 64, ...}."""

    sets: Mapping[str, Mapping[str, Any]]
    seconds: float
    kind: ClassVar[str] = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    path: str
    seconds: float
    kind: ClassVar[str] = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Event):
    code: str
    text: str
    kind: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged(Event):
    text: str
    kind: ClassVar[str] = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """`status`: done, failed or stopped."""

    status: str
    cause: str | None = None
    kind: ClassVar[str] = "end"


KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in (RunStarted, Progress, StepDone, EvalDone, CheckpointSaved, Warned, Logged, RunEnded)}
_FLAT = {"start": "info", "step": "metrics"}
"""Kinds whose one mapping is laid flat into the line, and the field that holds it."""
_COMMON = ("event", "time", "attempt", "step")


def to_line(event: Event) -> str:
    """One line of JSON without the newline. Numbers that are not finite become the strings "nan", "inf", "-inf": the line stays JSON."""
    flat = _FLAT.get(event.kind)
    record: dict[str, Any] = {"event": event.kind, "time": event.time, "attempt": event.attempt, "step": event.step}
    for item in fields(event):
        if item.name in record:
            continue
        value = getattr(event, item.name)
        if item.name == flat:
            clash = [key for key in value if key in _COMMON]
            assert not clash, f"metric names clash with the event's own: {clash}"
            record.update(value)
        else:
            record[item.name] = value
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)


def from_line(line: str) -> Event:
    """The event of one line. Raises ValueError for a torn line, an unknown kind, or missing fields."""
    record = json.loads(line)
    if not isinstance(record, dict) or record.get("event") not in KINDS:
        raise ValueError(f"not an event: {line[:80]!r}")
    cls = KINDS[record.pop("event")]
    flat = _FLAT.get(cls.kind)
    try:
        if flat is not None:
            common = {key: record.pop(key) for key in _COMMON[1:]}
            return cls(**common, **{flat: record})
        return cls(**record)
    except (TypeError, KeyError) as error:
        raise ValueError(f"incomplete {cls.kind} event: {error}") from error


def read_events(path: Path) -> Iterator[Event]:
    """All whole events of a file, in order."""
    with path.open(encoding="utf-8", errors="replace") as file:  # a line may be torn inside a character
        for line in file:
            if line.endswith("\n"):
                try:
                    yield from_line(line)
                except ValueError:
                    continue  # a line torn by a kill in the middle of a write, followed by a later attempt's lines


def gap(path: Path) -> str:
    """What has to be written before the next line: a newline after a line that a killed writer left open, else nothing."""
    if not path.exists() or path.stat().st_size == 0:
        return ""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return "" if file.read(1) == b"\n" else "\n"


def last_attempts(events: Iterable[Event]) -> list[Event]:
    """Events without the steps that a later attempt did again: for each (kind, step) of step, eval and checkpoint the last attempt wins."""
    kept = list(events)
    newest: dict[tuple[str, int], int] = {}
    for event in kept:
        if event.kind in ("step", "eval", "checkpoint"):
            newest[(event.kind, event.step)] = max(event.attempt, newest.get((event.kind, event.step), 0))
    return [e for e in kept if newest.get((e.kind, e.step), e.attempt) == e.attempt]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
