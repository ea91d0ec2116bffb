"""The live screen of a run in a terminal.

Says in two lines that the ranks are starting, takes over the terminal's second screen while the run goes on, and prints one clean last frame when it
is closed. What a frame shows is `screen`'s; this file knows when to draw. Leaves out standard outputs that are no terminal: those get `plain`; here
they get the last frame alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcli.events import Event, Logged, RunEnded, Warned
from rftcli.observe.files import read_json
from rftcli.observe.follow import newest_attempt
from rftcli.observe.history import History
from rftcli.observe.samples import first_samples
from rftcli.observe.text import clean

if TYPE_CHECKING:
    import rich.console

    from rftcli.observe.screen import Around

KEPT_POINTS = 1024
"""Points a curve keeps: far more than a terminal has columns, and a bound for runs of any length."""
REFRESHES_PER_SECOND = 4.0
_NO_START = (Warned, Logged, RunEnded)
"""Events that can come before an attempt has started."""


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
        from rich.text import Text

        from rftcli.observe.screen import Frame

        self._run_dir = run_dir
        self._history = History(limit=KEPT_POINTS)
        self._lock = threading.Lock()
        self._sample: tuple[int, Mapping[str, Any] | None] = (-1, None)
        self._console = RichConsole() if console is None else console
        self._frame = Frame(self._view, clock)
        self._live = Live(self._frame, console=self._console, screen=True, refresh_per_second=REFRESHES_PER_SECOND, redirect_stdout=False)
        self._newest: int | None = None
        self._stop_reason: str | None = None
        self._closed = False
        if self._console.is_terminal:
            self._console.print(Text(f"{clean(run_dir.name, 60)}: starting the ranks"))
            self._console.print(Text(f"log: {clean(str(run_dir / 'logs' / 'latest' / 'rank_0.log'), 1000)}"))

    def see(self, event: Event) -> None:
        with self._lock:
            self._history.see(event)
        if self._newest is None:
            self._newest = newest_attempt(self._run_dir)  # asked at the first event: an observer may be older than the attempt it is made for
        # the screen opens when the newest attempt has started; while it starts, and if it never does, the terminal keeps what stands on it
        started = event.attempt >= self._newest and not isinstance(event, _NO_START)
        if started and self._console.is_terminal and not self._live.is_started and not self._closed:
            self._live.start(refresh=True)

    def close(self) -> None:
        """Give the terminal back and leave the last frame on it, where there has been one."""
        if not self._closed:
            self._closed = True
            self._live.stop()
            self._frame.final = True
            if self._history.started:
                self._console.print(self._frame)

    def _view(self, draw: Callable[[History, Mapping[str, Any] | None, Around], Any]) -> Any:
        """Let `draw` read the state while no event changes it: the screen refreshes from a thread of its own."""
        from rftcli.observe.screen import Around

        with self._lock:
            step = self._history.step
            if self._history.metrics and self._sample[0] != step:
                self._sample = (step, next(iter(first_samples(self._run_dir, step, 1)), None))
            if self._stop_reason is None:  # one look at a path a refresh, until it is there
                self._stop_reason = read_json(self._run_dir / "attempts" / str(self._history.attempt) / "stop.json").get("reason")
            return draw(self._history, self._sample[1], Around(name=self._run_dir.name, stop_reason=self._stop_reason))
