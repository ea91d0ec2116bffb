"""An event loop in a thread of its own, for `async` reward functions. Apart from `functions`, because asyncio takes a while to import."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any

from rftcli.rewards.limits import end_a_child_of

CLOSE_SECONDS = 5.0
"""For functions to take note that they are cancelled."""


class EventLoop:
    """An event loop in a thread of its own, started when first needed: asynchronous functions of all threads run there side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_seconds: float | None = None) -> Any:
        """The coroutine's result, or what it raises, an exit included; blocks the calling thread. TimeoutError where it takes too long; it is
        cancelled then."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError("the reward table was closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="async-rewards", daemon=True)
                self._thread.start()
        contained = _contained(coroutine)
        awaited = contained if timeout_seconds is None else _within(contained, timeout_seconds)
        value, exit_asked = asyncio.run_coroutine_threadsafe(awaited, self._loop).result()
        if exit_asked is not None:
            raise exit_asked
        return value

    def close(self) -> None:
        """Cancel what still runs and end the thread; a second time does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or self._loop is None or self._thread is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(CLOSE_SECONDS)
        except TimeoutError:
            return  # a function that is `async` in name alone holds the loop; its thread is a daemon
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _contained(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """(result, None), or (None, the exit that it asks for): asyncio lets those two through, and the loop would end under all that wait for it."""
    process = os.getpid()
    try:
        return await coroutine, None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error
    finally:
        end_a_child_of(process)  # nobody waits for its copy of this loop


async def _within(awaitable: Awaitable[Any], seconds: float) -> Any:
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        raise TimeoutError(f"no value within {seconds:g} seconds") from None


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
