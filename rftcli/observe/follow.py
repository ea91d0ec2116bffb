"""Reading a run's events as they are written, and handing them to observers that may fail.

Leaves out where the events come from (rank 0 writes them) and what observers do with them. Nothing here writes into the run directory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from rftcli.events import Event, RunEnded, Warned, from_line
from rftcli.protocols import Observer

CHUNK_BYTES = 1 << 20
OnFailure = Callable[[Observer, Exception], None]
_log = logging.getLogger(__name__)


def follow(
    run_dir: Path,
    observers: Sequence[Observer],
    attempt: int,
    from_start: bool = True,
    stop: Callable[[], bool] | None = None,
    poll_seconds: float = 0.2,
    on_failure: OnFailure | None = None,
) -> RunEnded | None:
    """Feed the events of a run to observers until attempt `attempt` is over. The file need not exist yet.

    Returns the `end` event of this attempt; or None when a later attempt has begun, or when `stop()` said that the writer is gone and everything it
    wrote has been read. With `from_start` the events of earlier attempts are fed too, else only those of this attempt. Observers are not closed,
    except one that raises: it is reported once (see `Audience`), closed and left out from then on.
    """
    audience = Audience(observers, on_failure)
    tail = Tail(run_dir / "events.jsonl")
    try:
        while True:
            gone = stop is not None and stop()  # asked before reading, so that nothing the writer still wrote is missed
            for event in tail.events():
                if event.attempt > attempt:
                    return None
                if event.attempt < attempt and not from_start:
                    continue
                audience.see(event)
                if isinstance(event, RunEnded) and event.attempt == attempt:
                    return event
            if gone:
                return None
            time.sleep(poll_seconds)
    finally:
        tail.close()


def newest_attempt(run_dir: Path) -> int:
    """The number of the attempt that was begun last; 0 when there is none. Known before that attempt has written an event."""
    folder = run_dir / "attempts"
    return max((int(item.name) for item in folder.iterdir() if item.name.isdigit()), default=0) if folder.is_dir() else 0


class Tail:
    """The whole lines of a growing file. A last line without its newline waits; a line that is no event is passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def events(self) -> Iterator[Event]:
        """The events that were added since the last call."""
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        while chunk := self._file.read(CHUNK_BYTES):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                try:
                    yield from_line(line.decode("utf-8"))
                except ValueError:
                    continue  # torn by a kill in the middle of a write, or of a kind that a newer version added

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Audience:
    """Several observers as one. One that raises is reported once, closed and left out; the others go on.

    The report goes to the log with its traceback, to `on_failure`, and to the remaining observers as a warning `observer_failed`.
    """

    def __init__(self, observers: Sequence[Observer], on_failure: OnFailure | None = None) -> None:
        self._observers = list(observers)
        self._on_failure = on_failure

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those that are still in use."""
        return tuple(self._observers)

    def see(self, event: Event) -> None:
        failures = [(observer, error) for observer in self._observers if (error := _raised(lambda o=observer: o.see(event))) is not None]
        for observer, error in failures:
            self._leave_out(observer, error)
            name = type(observer).__name__
            text = f"{name} failed and is switched off for the rest of this run: {type(error).__name__}: {error}"
            self.see(Warned(time=event.time, attempt=event.attempt, step=event.step, code="observer_failed", text=text))

    def close(self) -> None:
        """Close all that are left; one that raises is reported and does not keep the others open."""
        while self._observers:
            observer = self._observers[0]
            error = _raised(observer.close)
            self._observers.pop(0)
            if error is not None:
                self._report(observer, error)

    def _leave_out(self, observer: Observer, error: Exception) -> None:
        self._observers = [other for other in self._observers if other is not observer]
        self._report(observer, error)
        closing = _raised(observer.close)
        if closing is not None:
            _log.warning("%s could not be closed either: %s", type(observer).__name__, closing)

    def _report(self, observer: Observer, error: Exception) -> None:
        _log.error("observer %s failed", type(observer).__name__, exc_info=error)
        if self._on_failure is not None:
            self._on_failure(observer, error)


def _raised(action: Callable[[], None]) -> Exception | None:
    """What the action raised, or None. An observer is foreign code to a run: whatever goes wrong in it must not end the run's reader."""
    try:
        action()
    except Exception as error:
        return error
    return None
