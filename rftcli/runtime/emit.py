"""Rank 0's pen: events to events.jsonl, state.json with its heartbeat. Other ranks hold one that writes nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from typing import IO

from rftcli.events import Event, Logged, Progress, Warned, gap, to_line
from rftcli.redact import known_values, redacted_text
from rftcli.runtime.rundir import HEARTBEAT_SECONDS, RunDir, State

_log = logging.getLogger("rft")
PROGRESS_SECONDS = 2.0
"""At most one progress event in this time."""


class Emitter:
    """Thread-safe. `writes` False: every call is accepted and nothing happens."""

    def __init__(self, run: RunDir, attempt: int, *, writes: bool, step: int = 0) -> None:
        self.attempt = attempt
        self.step = step
        self._run = run
        self._writes = writes
        self._secrets = known_values(os.environ)
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._last_progress = 0.0
        self._closing = threading.Event()
        self._state = State(status="running", step=step, attempt=attempt)
        if writes:
            first = gap(run.events)
            self._file = run.events.open("a", encoding="utf-8", errors="backslashreplace")
            self._file.write(first)
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    def emit(self, event: Event) -> None:
        if self._file is None:
            return
        with self._lock:
            self._file.write(to_line(event) + "\n")
            self._file.flush()

    def at(self, step: int) -> None:
        """From here on events belong to `step`. Every rank's log says so too: after a kill it is the last word."""
        _log.info("step %d: collect", step)
        self.step = step

    def warn(self, code: str, text: str) -> None:
        self.emit(Warned(time=time.time(), attempt=self.attempt, step=self.step, code=code, text=redacted_text(text, self._secrets)))

    def log(self, text: str) -> None:
        self.emit(Logged(time=time.time(), attempt=self.attempt, step=self.step, text=redacted_text(text, self._secrets)))

    def progress(self, stage: str, done: int, of: int) -> None:
        now = time.time()
        if self._file is None or now - self._last_progress < PROGRESS_SECONDS:
            return
        self._last_progress = now
        self.emit(Progress(time=now, attempt=self.attempt, step=self.step, stage=stage, done=done, of=of))

    def state(self, status: str, *, step: int, cause: str | None = None) -> None:
        if not self._writes:
            return
        with self._lock:
            self._state = State(status=status, step=step, attempt=self.attempt, cause=cause, heartbeat=time.time())
            self._run.write_state(self._state)

    def close(self) -> None:
        self._closing.set()
        if self._file is not None:
            self._thread.join()
            self._file.close()
            self._file = None

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_SECONDS):
            with self._lock:
                if self._state.status == "running":
                    self._state = replace(self._state, heartbeat=time.time())
                    with contextlib.suppress(OSError):  # a full disk: the next event says so; the next beat may find room
                        self._run.write_state(self._state)
