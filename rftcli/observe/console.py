"""The live screen of a run in a terminal.

Takes over the terminal's second screen while the run goes on and prints one clean last frame when it is closed. What a frame shows is `screen`'s;
this file knows when to draw. Leaves out standard outputs that are no terminal: those get `plain`; here they get the last frame alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcli.events import Event
from rftcli.observe.history import History
from rftcli.observe.samples import first_samples

if TYPE_CHECKING:
    import rich.console

KEPT_POINTS = 1024
"""Points a curve keeps: far more than a terminal has columns, and a bound for runs of any length."""
REFRESHES_PER_SECOND = 4.0


class Console:
    """Draws the run in `run_dir`. `console` and `clock` (seconds since the epoch) are for callers that bring their own."""

    def __init__(
        self,
        run_dir: Path,
        options: Any = None,
        *,
        console: rich.console.Console | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        from rftcli.observe.screen import Frame

        self._run_dir = run_dir
        self._history = History(limit=KEPT_POINTS)
        self._lock = threading.Lock()
        self._sample: tuple[int, Mapping[str, Any] | None] = (-1, None)
        self._console = RichConsole() if console is None else console
        self._frame = Frame(self._view, clock)
        self._live: Live | None = None
        self._closed = False
        if self._console.is_terminal:
            self._live = Live(self._frame, console=self._console, screen=True, refresh_per_second=REFRESHES_PER_SECOND, redirect_stdout=False)
            self._live.start()

    def see(self, event: Event) -> None:
        with self._lock:
            self._history.see(event)

    def close(self) -> None:
        """Give the terminal back and leave the last frame on it."""
        if not self._closed:
            self._closed = True
            if self._live is not None:
                self._live.stop()
            self._frame.final = True
            self._console.print(self._frame)

    def _view(self, draw: Callable[[History, Mapping[str, Any] | None], Any]) -> Any:
        """Let `draw` read the state while no event changes it: the screen refreshes from a thread of its own."""
        with self._lock:
            step = self._history.step
            if self._history.metrics and self._sample[0] != step:
                self._sample = (step, next(iter(first_samples(self._run_dir, step, 1)), None))
            return draw(self._history, self._sample[1])
