"""`rft status`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from rftcli.cli import talk
from rftcli.errors import UsageError
from rftcli.events import EvalDone, Event, RunStarted, StepDone, Warned, last_attempts, read_events, to_line

app = typer.Typer(add_completion=False)
T = TypeVar("T", bound=Event)
SHOWN = 3
"""Warnings whose text is shown, the last ones; --json has all."""


@app.command()
def status(
    run_dir: Annotated[Path | None, typer.Argument(help="The run directory; default: the newest under runs/.")] = None,
    as_json: talk.Json = False,
) -> int:
    """Say how a run stands."""
    from rftcli.codec import to_data
    from rftcli.runtime.rundir import RunDir
    from rftcli.runtime.verdict import why_dead

    run = RunDir(_newest() if run_dir is None else run_dir)
    state = run.read_state()
    if state is None:
        raise UsageError(f"{run.path} is not a run directory (no state.json)")
    dead = why_dead(run, state)
    events = last_attempts(read_events(run.events)) if run.events.exists() else []
    steps = next((event.info["steps"] for event in reversed(events) if isinstance(event, RunStarted) and "steps" in event.info), None)
    if as_json:
        talk.data({"run_dir": str(run.path), **to_data(state), "dead": dead is not None, "steps": steps, **_newest_of(events)})
        return 0
    word = state.status if dead is None else f"dead ({dead}; `rft resume {run.quoted}`)"
    lines = [str(run.path), f"{word}, step {state.step}{f' of {steps}' if steps else ''}, attempt {state.attempt}", *_numbers(events)]
    print(talk.plain("\n".join(lines + ([state.cause] if state.cause else []))))
    return 0


def _newest_of(events: list[Event]) -> dict[str, Any]:
    """The metrics of the last step and the last evaluation as their events have them, null where there was none, and all warnings."""
    step, held_out = _last(events, StepDone), _last(events, EvalDone)
    return {
        "last_step": None if step is None else _record(step),
        "last_eval": None if held_out is None else _record(held_out),
        "warnings": [_record(event) for event in events if isinstance(event, Warned)],
    }


def _record(event: Event) -> dict[str, Any]:
    """As its line in events.jsonl, but for the kind."""
    found = json.loads(to_line(event))
    del found["event"]
    return found


def _last(events: list[Event], kind: type[T]) -> T | None:
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def _numbers(events: list[Event]) -> list[str]:
    """The newest reward and held-out means, which warnings there were, and the last of them."""
    found = []
    step = _last(events, StepDone)
    if step is not None and "reward_mean" in step.metrics:
        found.append(f"reward {_number(step.metrics['reward_mean'])} (step {step.step})")
    held_out = _last(events, EvalDone)
    if held_out is not None:
        for name, values in held_out.sets.items():
            means = [f"{key} {_number(value['value'])}" for key, value in values.items() if key.startswith("mean@")]
            found.append(f"{name} {', '.join(means)} (step {held_out.step})")
    warned = [event for event in events if isinstance(event, Warned)]
    if warned:
        counts = Counter(event.code for event in warned)
        found.append(f"warnings {', '.join(f'{code} x{count}' for code, count in counts.items())}")
        latest = {event.code: event for event in warned}  # of each code its last one
        shown = sorted(latest.values(), key=warned.index)[-SHOWN:]
        found += [f"  step {event.step} {event.code}: {event.text}" for event in shown]
    return found


def _number(value: float | str) -> str:
    """What is not finite is text in an event."""
    return f"{float(value):.3g}"


def _newest() -> Path:
    runs = sorted(Path("runs").glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UsageError("there are no runs under ./runs", hint="name the run directory")
    return runs[-1].parent
