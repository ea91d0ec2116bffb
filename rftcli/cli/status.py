"""`rft status`."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from rftcli.cli import talk
from rftcli.errors import UsageError
from rftcli.events import EvalDone, Event, RunStarted, StepDone, Warned, last_attempts, read_events, to_line
from rftcli.observe.numbers import flatten, means_with_intervals
from rftcli.observe.text import columns_of, duration, interval, percent, short, wrapped

app = typer.Typer(add_completion=False)
T = TypeVar("T", bound=Event)
SHOWN = 3
"""Warnings whose text is shown, the last ones; --json has all."""
SMALL = 0.005
"""A stage that took no larger share of its step is left out; --json has all."""


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
        raise UsageError(f"{run.path} is not a run directory (no state.json)", hint=_meant(run.path))
    dead = why_dead(run, state)
    events = last_attempts(read_events(run.events)) if run.events.exists() else []
    steps = next((event.info["steps"] for event in reversed(events) if isinstance(event, RunStarted) and "steps" in event.info), None)
    if as_json:
        talk.data({"run_dir": str(run.path), **to_data(state), "dead": dead is not None, "steps": steps, **_newest_of(events)})
        return 0
    word = state.status if dead is None else f"dead ({dead}; `rft resume {run.quoted}`)"
    lines = [str(run.path), f"{word}, step {state.step}{f' of {steps}' if steps else ''}, attempt {state.attempt}"]
    lines += [wrapped(line, columns_of(sys.stdout), 4) for line in _numbers(events)]
    lines += [state.cause] if state.cause else []
    if state.status in ("failed", "stopped") and (hint := talk.way_on(run)) is not None:
        lines.append(hint)
    print(talk.plain("\n".join(lines)))
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
    """The newest reward, where its step's time went, the newest held-out means, which warnings there were, and the last of them."""
    found = []
    step = _last(events, StepDone)
    if step is not None:
        flat = flatten(step.metrics, ".")
        if "reward_mean" in flat:
            found.append(f"reward {short(flat['reward_mean'])} (step {step.step})")
        found += _time(step.step, flat)
    held_out = _last(events, EvalDone)
    if held_out is not None:
        for name, values in held_out.sets.items():
            means = [f"{key} {interval(*value)}" for key, value in means_with_intervals(values).items() if key.startswith("mean@")]
            found.append(f"eval {name} {', '.join(means)} (step {held_out.step})")
    warned = [event for event in events if isinstance(event, Warned)]
    if warned:
        counts = Counter(event.code for event in warned)
        found.append(f"warnings {', '.join(f'{code} x{count}' for code, count in counts.items())}")
        latest = {event.code: event for event in warned}  # of each code its last one
        shown = sorted(latest.values(), key=warned.index)[-SHOWN:]
        found += [f"  step {event.step} {event.code}: {event.text}" for event in shown]
    return found


def _time(step: int, flat: Mapping[str, float]) -> list[str]:
    """What each stage took of a step, the largest share first, and how fast it was."""
    total = flat.get("seconds.total", math.nan)
    if not 0 < total < math.inf:
        return []
    shares = {name.removeprefix("seconds."): value / total for name, value in flat.items() if name.startswith("seconds.")}
    shares = {name: share for name, share in shares.items() if name != "total" and share > SMALL}
    speed = []
    if (each := flat.get("tokens_per_second_per_gpu")) is not None:
        speed.append(f"{each:,.0f} tokens/s on each GPU")
    elif (tokens := flat.get("tokens")) is not None:
        speed.append(f"{tokens / total:,.0f} tokens/s")
    if (used := flat.get("mfu")) is not None:
        speed.append(f"MFU {percent(used)}")
    stages = ", ".join(f"{name} {percent(share)}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
    return ["; ".join(part for part in (f"step {step} took {duration(total)}: {stages}", ", ".join(speed)) if part)]


def _meant(given: Path) -> str:
    named = Path("runs") / given.name
    return f"did you mean {named}?" if (named / "state.json").is_file() else "without a directory it is the newest run under ./runs"


def _newest() -> Path:
    runs = sorted(Path("runs").glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UsageError("there are no runs under ./runs", hint="name the run directory")
    return runs[-1].parent
