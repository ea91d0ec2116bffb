"""Helper processes for checks that may hang, crash or eat memory: lines of JSON over pipes, with a wall-clock limit kept by the caller.

No signals in the calling process, so it works from any thread. No fork of its memory either: a fresh interpreter is started, so threads, locks
and process groups of the caller are not copied. Two things end a helper whose caller is gone, even killed: the end of its standard input while
it waits, and a kernel timer with the default action (end the process) while it works, which fires even when one C call holds the interpreter.
A parent-death signal is not used: Linux sends it when the *thread* that started the helper ends, and here that is a thread of a pool.

Leaves out what is checked: a helper module has a `main` that calls `serve` (see `math_worker`). It is no sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_LIMIT_SECONDS = 120.0
"""For imports, which may come from a slow network disk."""
ORPHAN_GRACE_SECONDS = 2.0
"""How much later than the caller's limit a helper ends itself."""
MEMORY_LIMIT_BYTES = 4 << 30
"""Address space of a helper: an answer that evaluates to a gigantic number ends in a MemoryError, not in a full machine."""
ERROR_CHARACTERS = 1000

# The caller's import path is handed over as it is, so the helper runs the same code; `-P` keeps the working directory out.
_BOOT = "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[2]); importlib.import_module(sys.argv[1]).main()"
# One thread per helper, and the same hash seed everywhere: a verdict must not depend on the order of a set.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class WorkerTimeout(Exception):
    """The helper gave no answer in time and was killed."""


class WorkerCrashed(Exception):
    """The helper ended, could not start, or its pool was closed."""


class WorkerError(Exception):
    """The helper answered with an error; the text is its."""


class WorkerPool:
    """Up to `size` helpers that run `module`, each started when first needed and again after it was lost; `warm` starts the first one ahead. Any
    thread may call."""

    def __init__(self, module: str, size: int = 2) -> None:
        self._module, self._size = module, size
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # last in, first out: a second helper starts only when the first is busy
        for _ in range(size):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._live: set[_Worker] = set()
        self._closed = False

    def call(self, request: Any, limit_seconds: float) -> Any:
        """The helper's value for a request of plain JSON. The limit starts when a helper takes it up, waiting for one is not counted.

        Raises WorkerTimeout, WorkerCrashed or WorkerError; the next call finds a working helper again.
        """
        line = json.dumps({"limit_seconds": limit_seconds, "request": request}).encode() + b"\n"
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive():
                self._drop(worker)
                worker = None
                worker = self._start()
            self._wait_for(worker)
            return worker.ask(line, limit_seconds)
        except WorkerError:
            raise
        except BaseException:  # also Ctrl-C: a helper that still owes a reply must not get the next request
            self._drop(worker)
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def warm(self) -> None:
        """Start a helper if none is there, and do not wait for it: its imports run beside what the caller does. The first call tells if it cannot."""
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._start()
        except (OSError, WorkerCrashed):
            worker = None
        finally:
            self._idle.put(worker)

    def pids(self) -> list[int]:
        """Process ids of the helpers that are running."""
        with self._lock:
            return sorted(worker.pid for worker in self._live)

    def close(self) -> None:
        """End all helpers and wait for calls that are under way: they, and all later ones, raise WorkerCrashed."""
        with self._lock:
            self._closed = True
            for worker in self._live:
                worker.kill()
        slots = [self._idle.get() for _ in range(self._size)]
        for worker in slots:
            self._drop(worker)
            self._idle.put(None)

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise WorkerCrashed(f"the pool of `{self._module}` was closed")
            worker = _Worker(self._module)
            self._live.add(worker)
        return worker

    def _wait_for(self, worker: _Worker) -> None:
        """Until a helper that was started has said that it can work."""
        if worker.ready:
            return
        try:
            worker.reply(START_LIMIT_SECONDS)
        except WorkerError as error:
            raise WorkerCrashed(f"`{self._module}` cannot run: {error}") from None
        worker.ready = True

    def _drop(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._live.discard(worker)
            worker.stop()


class _Worker:
    """One helper process; its pool lends it to one caller at a time."""

    def __init__(self, module: str) -> None:
        self._module, self.ready = module, False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in `stop`
        path = json.dumps([entry or str(Path.cwd()) for entry in sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, module, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | _ENVIRONMENT,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies, selectors.EVENT_READ)
        self._buffer = b""
        self.pid = self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, limit_seconds: float) -> Any:
        try:
            self._requests.write(line)
            self._requests.flush()
        except BrokenPipeError:
            raise WorkerCrashed(self._obituary()) from None
        return self.reply(limit_seconds)

    def reply(self, limit_seconds: float) -> Any:
        """The next reply of the helper, as soon as it is there."""
        deadline = time.monotonic() + limit_seconds
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not self._selector.select(remaining):
                raise WorkerTimeout(f"no verdict within {limit_seconds:g} seconds")
            chunk = os.read(self._replies.fileno(), 1 << 16)
            if not chunk:
                raise WorkerCrashed(self._obituary())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["value"]

    def kill(self) -> None:
        """End the process, from any thread. The pipes stay open: a thread that reads them sees the end of the file, never a stranger's pipe."""
        self._process.kill()

    def stop(self) -> None:
        """End the process and close its pipes; only for the one caller who holds the helper."""
        self._process.kill()
        self._process.wait()
        self._selector.close()
        for stream in (self._requests, self._replies, self._errors):
            with contextlib.suppress(BrokenPipeError):  # a request that was never read is still in the buffer
                stream.close()

    def _obituary(self) -> str:
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - ERROR_CHARACTERS))
        words = self._errors.read().decode(errors="replace").strip()
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"`{self._module}` ended ({ended})" + (f": {words}" if words else "")


def serve(prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """The helper's whole life: `prepare` imports what is heavy and gives the function that answers requests; it ends with standard input.

    An exception of either becomes an error reply. What libraries print goes to standard error: standard output belongs to the replies.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit(resource.RLIMIT_AS, MEMORY_LIMIT_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def respond(work: Callable[[], Any], limit_seconds: float) -> bool:
        signal.setitimer(signal.ITIMER_REAL, limit_seconds + ORPHAN_GRACE_SECONDS)
        try:
            line = json.dumps({"value": work()})
        except Exception as error:  # code of a library on text of a model: anything may come, and all of it is the caller's to count
            line = json.dumps({"error": f"{type(error).__name__}: {str(error)[:ERROR_CHARACTERS]}"})
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(line.encode() + b"\n")
        replies.flush()
        return line.startswith('{"value"')

    handler: list[Callable[[Any], Any]] = []
    if respond(lambda: handler.append(prepare()), START_LIMIT_SECONDS):
        for line in sys.stdin.buffer:
            message = json.loads(line)
            respond(lambda: handler[0](message["request"]), message["limit_seconds"])  # noqa: B023  called at once


def _limit(what: int, soft: int) -> None:
    """Lower a limit of this process; a lower one that is already set stays."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
