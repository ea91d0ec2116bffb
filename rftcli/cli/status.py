"""`rft status`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from rftcli.cli import talk
from rftcli.errors import UsageError

app = typer.Typer(add_completion=False)


@app.command()
def status(
    run_dir: Annotated[Path | None, typer.Argument(help="The run directory; default: the newest under runs/.")] = None,
    as_json: talk.Json = False,
) -> int:
    """Say how a run stands."""
    from rftcli.codec import to_data
    from rftcli.runtime.rundir import RunDir

    run = RunDir(_newest() if run_dir is None else run_dir)
    state = run.read_state()
    if state is None:
        raise UsageError(f"{run.path} is not a run directory (no state.json)")
    if as_json:
        talk.data({"run_dir": str(run.path), **to_data(state), "dead": state.looks_dead})
        return 0
    age = time.time() - state.heartbeat
    word = f"dead (no heartbeat for {age:.0f} s; `rft resume {run.path}`)" if state.looks_dead else state.status
    print(f"{run.path}\n{word}, step {state.step}, attempt {state.attempt}" + (f"\n{state.cause}" if state.cause else ""))
    return 0


def _newest() -> Path:
    runs = sorted(Path("runs").glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UsageError("there are no runs under ./runs", hint="name the run directory")
    return runs[-1].parent
