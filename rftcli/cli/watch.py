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


def finish(run: RunDir, outcome: Outcome, *, as_json: bool, what: str = "run") -> int:
    """The summary as data; then, where it did not end well, why, and how to go on: whole, once, and last. The exit code."""
    from rftcli.events import last_attempts, read_events
    from rftcli.observe.history import History, summary
    from rftcli.observe.text import columns_of

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
            print(summary(history, run.path, columns_of(sys.stdout)))
        sys.stdout.flush()
    except OSError as error:  # `| head`, a closed terminal: whoever read has gone, the run's outcome has not
        if error.errno not in talk.NOBODY_READS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    refused = outcome.exit_code == EXIT_RESUME
    if refused:
        talk.say(f"error: resume refused: {state.cause}")
    elif state.status == "failed":
        when = "" if what != "run" else f" after step {state.step}" if state.step else " before its first step was over"
        talk.say(f"error: the {what} failed{when}: {state.cause}")
    elif state.status == "stopped":
        talk.say(f"stopped: {state.cause}" if state.cause else "stopped")
    if state.status in ("failed", "stopped") and not refused and (hint := talk.way_on(run)) is not None:
        talk.say(hint)
    return outcome.exit_code
