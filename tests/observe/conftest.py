"""Events and run directories for the tests of observers."""

import contextlib
import fcntl
import json
import os
import pty
import struct
import termios
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest

from rftcli.events import Event, StepDone, to_line


@pytest.fixture
def append_events() -> Callable[[Path, Iterable[Event]], None]:
    def append(run_dir: Path, events: Iterable[Event]) -> None:
        with (run_dir / "events.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(to_line(event) + "\n" for event in events)

    return append


@pytest.fixture
def on_terminal() -> Callable[[int, Callable[[TextIO], None]], str]:
    """What `write` leaves on a terminal of so many columns, as the program has written it."""

    def run(columns: int, write: Callable[[TextIO], None]) -> str:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with os.fdopen(theirs, "w") as stream:
            write(stream)
        shown = b""
        with contextlib.suppress(OSError):  # all is read, and the other end is closed
            while piece := os.read(ours, 65536):
                shown += piece
        os.close(ours)
        return shown.decode().replace("\r\n", "\n")

    return run


@pytest.fixture
def step_done() -> Callable[..., StepDone]:
    """A step of 10 seconds with the metrics given."""

    def make(step: int, attempt: int = 1, **metrics: Any) -> StepDone:
        return StepDone(time=1000.0 * attempt + 10.0 * step, attempt=attempt, step=step, metrics=metrics)

    return make


@pytest.fixture
def write_samples() -> Callable[[Path, int, Iterable[Mapping[str, Any]]], None]:
    def write(run_dir: Path, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        path = run_dir / "samples" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples), encoding="utf-8")

    return write
