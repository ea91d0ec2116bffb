"""How a command watches a run and speaks of its end."""

from __future__ import annotations

import os
import sys

from rftcli.cli import talk
from rftcli.codec import to_data
from rftcli.errors import EXIT_RESUME
from rftcli.protocols import Observer
from rftcli.runtime.launch import Outcome
from rftcli.runtime.rundir import RunDir


def watchers(run: RunDir, *, quiet: bool) -> list[Observer]:
    """The live screen on a terminal, one line a step elsewhere, nothing when quiet."""
    from rftcli.observe.table import make_observer

    if quiet:
        return []
    live = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return [make_observer("console" if live else "plain", run.path)]


def finish(run: RunDir, outcome: Outcome, *, as_json: bool) -> int:
    """Summary or cause; the exit code."""
    from rftcli.events import last_attempts, read_events
    from rftcli.observe.history import History, summary

    events = last_attempts(read_events(run.events)) if run.events.exists() else []
    state = outcome.state
    try:
        if as_json:
            evals = {event.step: event.sets for event in events if event.kind == "eval"}
            talk.data({"run_dir": str(run.path), "exit_code": outcome.exit_code, **to_data(state), "evals": evals})
        elif events:
            history = History()
            for event in events:
                history.see(event)
            print(summary(history, run.path))
        sys.stdout.flush()
    except OSError as error:  # `| head`, a closed terminal: whoever read has gone, the run's outcome has not
        if error.errno not in talk.NOBODY_READS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if state.status == "failed":
        talk.say(f"error: the run failed at step {state.step}: {state.cause}")
        if run.committed_checkpoints() and outcome.exit_code != EXIT_RESUME:
            talk.say(f"hint: `rft resume {run.quoted}` goes on from {run.committed_checkpoints()[-1].name}")
    elif state.status == "stopped":
        talk.say(state.cause or "stopped")
        if run.committed_checkpoints():
            talk.say(f"`rft resume {run.quoted}` goes on")
    return outcome.exit_code
