"""`rft status`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk
from rftcli.errors import UsageError
from rftcli.events import EvalDone, Event, RunStarted, StepDone, Warned, last_attempts, read_events

app = typer.Typer(add_completion=False)


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
    if as_json:
        talk.data({"run_dir": str(run.path), **to_data(state), "dead": dead is not None})
        return 0
    word = state.status if dead is None else f"dead ({dead}; `rft resume {run.path}`)"
    events = last_attempts(read_events(run.events)) if run.events.exists() else []
    steps = next((event.info["steps"] for event in reversed(events) if isinstance(event, RunStarted) and "steps" in event.info), None)
    lines = [str(run.path), f"{word}, step {state.step}{f' of {steps}' if steps else ''}, attempt {state.attempt}", *_numbers(events)]
    print(talk.plain("\n".join(lines + ([state.cause] if state.cause else []))))
    return 0


def _numbers(events: list[Event]) -> list[str]:
    """The newest reward and held-out means, and which warnings there were."""
    found = []
    step = next((event for event in reversed(events) if isinstance(event, StepDone)), None)
    if step is not None and "reward_mean" in step.metrics:
        found.append(f"reward {step.metrics['reward_mean']:.3g} (step {step.step})")
    held_out = next((event for event in reversed(events) if isinstance(event, EvalDone)), None)
    if held_out is not None:
        for name, values in held_out.sets.items():
            means = [f"{key} {value['value']:.3g}" for key, value in values.items() if key.startswith("mean@")]
            found.append(f"{name} {', '.join(means)} (step {held_out.step})")
    warned = Counter(event.code for event in events if isinstance(event, Warned))
    if warned:
        found.append(f"warnings {', '.join(f'{code} x{count}' for code, count in warned.items())}")
    return found


def _newest() -> Path:
    runs = sorted(Path("runs").glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UsageError("there are no runs under ./runs", hint="name the run directory")
    return runs[-1].parent
