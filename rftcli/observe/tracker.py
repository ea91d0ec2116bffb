"""The side process beside the ranks: follows a run's events with the trackers of its recipe.

    python -m rftcli.observe.tracker RUN_DIR --attempt 2 --spec '{"tensorboard": true, "wandb": {"project": "rft"}}'

Rank 0 starts it and forgets it: no tracker can stop or slow the run. It writes its log to `attempts/N/logs/trackers.log` and what became of each
tracker to `attempts/N/trackers_status.json`, `{"tensorboard": "ok", "wandb": "failed: why"}`, which rank 0 turns into a warning. It ends when the
attempt's `end` event has been handed on, or when its parent is gone and everything it wrote has been read. Interrupts and terminations are left
to the ranks, which agree on a stop and write the end; after that a termination ends this process at once. Leaves out what trackers do
(`tensorboard`, `wandb`) and how failures are isolated (`follow`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rftcli.observe.files import write_json
from rftcli.observe.follow import Audience, follow
from rftcli.observe.table import make_observer
from rftcli.protocols import Observer

CLOSE_SECONDS = 300.0
"""How long the trackers may take to finish (wandb uploads what is left) before the process ends without them."""
LATE = "did not finish in time; what is kept on disk can be uploaded later"
_log = logging.getLogger(__name__)


@runtime_checkable
class Noted(Protocol):
    """An observer that may have started otherwise than it was asked to, and says how."""

    note: str | None


class Status:
    """What became of each tracker, on disk after every change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._status: dict[str, str] = {}

    def ok(self, name: str, note: str | None = None) -> None:
        """`note`: what a person should know all the same."""
        self._set(name, note or "ok")

    def failed(self, name: str, why: str) -> None:
        self._set(name, f"failed: {why}")

    def _set(self, name: str, text: str) -> None:
        self._status[name] = text
        write_json(self._path, self._status)


def track(run_dir: Path, attempt: int, spec: Mapping[str, Any], parent: int, close_seconds: float = CLOSE_SECONDS) -> bool:
    """Follow one attempt with the trackers of `spec` (the recipe's `track` section) until it is over or process `parent` is no longer our parent.

    Returns False if the trackers did not finish within `close_seconds`; their threads are then still at it.
    """
    status = Status(run_dir / "attempts" / str(attempt) / "trackers_status.json")
    names: dict[int, str] = {}
    observers: list[Observer] = []
    for name, options in spec.items():
        if options is None or options is False:
            continue
        try:
            observer = make_observer(name, run_dir, options)
        except Exception as error:  # a tracker is foreign code; whatever keeps it from starting is reported, and the others start
            _log.exception("tracker %s could not start", name)
            status.failed(name, _one_line(error))
        else:
            observers.append(observer)
            names[id(observer)] = name
            status.ok(name, observer.note if isinstance(observer, Noted) else None)

    def failed(observer: Observer, error: Exception) -> None:
        status.failed(names[id(observer)], _one_line(error))

    audience = Audience(observers, failed)
    follow(run_dir, [audience], attempt, from_start=False, stop=lambda: os.getppid() != parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from here on only an upload is waited for, and whoever started us may give it up
    late = close_within(audience, close_seconds)
    for observer in late:
        status.failed(names[id(observer)], LATE)
    return not late


def close_within(audience: Audience, seconds: float) -> tuple[Observer, ...]:
    """Close all observers in a thread of their own, and wait for it that long. Returns those that were not finished by then."""
    closing = threading.Thread(target=audience.close, name="close-trackers", daemon=True)
    closing.start()
    closing.join(seconds)
    return audience.observers


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rftcli.observe.tracker", description="Follow a run with its trackers.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--spec", type=json.loads, required=True, help="the recipe's track section as JSON")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process whose end ends this one too (default: the one that started it)")
    chosen = parser.parse_args(arguments)
    _leave_the_terminal(chosen.run_dir / "attempts" / str(chosen.attempt) / "logs" / "trackers.log")
    finished = track(chosen.run_dir, chosen.attempt, chosen.spec, chosen.parent)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if finished else 1)  # a tracker that hangs in its own exit handlers would keep the process alive


def _leave_the_terminal(log: Path) -> None:
    """Everything this process and its children print goes to the log; nothing is read; stop requests are the ranks' business."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


if __name__ == "__main__":
    sys.exit(main())
