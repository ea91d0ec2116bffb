"""A request to stop is taken when the step is over, and a function without a time limit can keep a step from ever being over. So once a stop is asked
for, a call that does not return within a grace ends the step, as a second request would: with the last checkpoint as it is.

Leaves out how a stop is asked for, and calls with a limit of their own: rules, services, parts with `timeout_seconds`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rftcli.errors import HeldUpError

T = TypeVar("T")
STOP_GRACE_SECONDS = 60.0
"""For one call, counted from the request or from its own start, whichever is later: slow parts finish their step."""
LOOKS = 120
"""In one grace: how often the request is looked for."""


def nobody_asks() -> bool:
    return False


class Grace:
    """Of one reward table. `stop_asked` says whether the run has been asked to stop."""

    def __init__(self, stop_asked: Callable[[], bool], seconds: float = STOP_GRACE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop_asked, self._seconds, self._clock = stop_asked, seconds, clock
        self._lock = threading.Lock()
        self._calls: dict[object, tuple[float, str, str]] = {}
        self._asked_at: float | None = None

    @contextmanager
    def call(self, what: str, where: str) -> Iterator[None]:
        """A call without a limit, from its start to its end, in whatever thread."""
        key = object()
        with self._lock:
            self._calls[key] = (self._clock(), what, where)
        try:
            yield
        finally:
            with self._lock:
                del self._calls[key]

    def next(self, ended: SimpleQueue[Future[T]]) -> Future[T]:
        """The future that ended first, once there is one. HeldUpError where a call has used up its grace."""
        while True:
            try:
                return ended.get(timeout=self._seconds / LOOKS)
            except Empty:
                self._look()

    def result(self, future: Future[T]) -> T:
        """What the future holds, waited for in the same way."""
        ended: SimpleQueue[Future[T]] = SimpleQueue()
        future.add_done_callback(ended.put)
        return self.next(ended).result()

    def _look(self) -> None:
        if not self._stop_asked():
            return
        now = self._clock()
        self._asked_at = now if self._asked_at is None else self._asked_at
        with self._lock:
            calls = sorted(self._calls.values(), key=lambda call: call[0])
        for start, what, where in calls:
            if now - max(start, self._asked_at) >= self._seconds:
                raise HeldUpError(
                    f"asked to stop, and {what} has not returned on {where} for {now - start:.0f} seconds: the step is left unfinished",
                    hint="`timeout_seconds` on the part makes such a call an error of its sample",
                )


def row_of(completion: Any) -> str:
    """Where in the data a call is, for errors."""
    return f"row {completion.prompt.row_id} (draw {completion.prompt.draw}, sample {completion.sample})"
