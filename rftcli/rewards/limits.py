"""A limit of time for code that cannot be ended: it runs in a thread of its own, which is left behind when the limit is over.

Python has no way to stop a thread. A function that is `async`, or a rule with a helper process, is really ended; this is for the rest. So that
threads do not pile up without end, no call starts while too many of them are still running.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from rftcli.errors import EXIT_FAILED

MOST_LEFT_BEHIND = 64


def end_a_child_of(process: int) -> None:
    """End this process if it is not `process`, but a child that somebody's function has forked: it must not go on as the rank."""
    if os.getpid() != process:
        os._exit(EXIT_FAILED)


class TimedCalls:
    """Calls of one part. `call` may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: set[threading.Thread] = set()

    def call(self, work: Callable[[], Any], seconds: float) -> Any:
        """What `work` returns or raises. TimeoutError after `seconds`; RuntimeError while MOST_LEFT_BEHIND earlier calls have not returned."""
        with self._lock:
            self._left = {thread for thread in self._left if thread.is_alive()}
            if len(self._left) >= MOST_LEFT_BEHIND:
                raise RuntimeError(f"{len(self._left)} earlier calls went over their time limit and never returned")
        outcome: dict[str, Any] = {}
        process = os.getpid()

        def run() -> None:
            try:
                outcome["value"] = work()
            except BaseException as error:  # handed to the caller, in its thread
                outcome["error"] = error
            finally:
                end_a_child_of(process)

        thread = threading.Thread(target=run, name="timed-reward", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            with self._lock:
                self._left.add(thread)
            raise TimeoutError(f"no value within {seconds:g} seconds")
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]
