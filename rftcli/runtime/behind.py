"""A checkpoint written behind the next steps: from copies, by a thread on every rank, committed by rank 0 when all ranks have written.

One at a time. No collective runs in a thread: a rank tells that it is through by a file beside its others, which rank 0 waits for. What failed is
agreed on at a step boundary, where every rank raises alike; a checkpoint that is not committed does not exist, so a kill at any time leaves the one
before. Leaves out what is written (`checkpoint`) and copied (`writes`).
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rftcli.errors import RftError
from rftcli.protocols import World

WRITTEN = ".written_"
"""In front of a rank's number: its part is whole."""
LOOK_SECONDS = 0.05
"""Between two looks for the files of the other ranks."""
GRACE_SECONDS = 60.0
"""How long a run that ends by an error waits for the checkpoint it was writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """One checkpoint on its way to the disk."""

    step: int
    target: Path
    folder: Path
    """Where it is written before it is whole."""
    actions: Sequence[Callable[[], None]]
    """Of this rank."""
    commit: Callable[[], None]
    """Rank 0's, when all have written."""
    describe: Callable[[Exception], str]
    refuse: Callable[[Sequence[str | None]], RftError]
    """The error of every rank, from what went wrong on each."""
    began: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    step: int
    target: Path
    seconds: float
    """From the step's end to the commit."""


class Behind:
    """`settle` and `start` are collective: every rank calls them at the same boundaries."""

    def __init__(self, world: World, clock: Callable[[], float] = time.perf_counter) -> None:
        self._world = world
        self.clock = clock
        self._writing: Writing | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._finished = 0.0
        self._abandoned = threading.Event()

    def start(self, writing: Writing) -> None:
        """Nothing else is being written: `settle` has waited."""
        assert self._writing is None, "one checkpoint at a time"
        self._writing, self._failure = writing, None
        self._thread = threading.Thread(target=self._write, args=(writing,), name="checkpoint", daemon=True)
        self._thread.start()

    def settle(self, *, wait: bool) -> Committed | None:
        """What has been committed since the last call. RftError on every rank alike when one could not write. `wait`: until either."""
        writing, thread = self._writing, self._thread
        if writing is None or thread is None:
            return None
        # what the ranks see may differ by a moment: they act on what all have seen
        seen = self._world.gather((thread.is_alive(), self._failure))
        while wait and any(alive for alive, _ in seen) and all(text is None for _, text in seen):
            thread.join(LOOK_SECONDS)
            seen = self._world.gather((thread.is_alive(), self._failure))
        failures = [text for _, text in seen]
        if any(text is not None for text in failures):
            self._give_up(writing, thread)
            raise writing.refuse(failures)
        if any(alive for alive, _ in seen):
            return None
        self._writing = self._thread = None
        return Committed(step=writing.step, target=writing.target, seconds=self._finished - writing.began)

    def close(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """The run ends by an error, and other ranks may be gone: what is nearly whole becomes whole, the rest is left to the next attempt."""
        if self._thread is not None:
            self._thread.join(grace_seconds)
            self._abandoned.set()

    def _give_up(self, writing: Writing, thread: threading.Thread) -> None:
        """No thread writes any more when the half checkpoint is removed."""
        self._abandoned.set()
        thread.join()
        self._world.barrier("checkpoint given up")
        self._writing = self._thread = None
        self._abandoned.clear()
        if self._world.rank == 0:
            shutil.rmtree(writing.folder, ignore_errors=True)

    def _write(self, writing: Writing) -> None:
        try:
            for action in writing.actions:
                action()
            (writing.folder / f"{WRITTEN}{self._world.rank}").touch()
            if self._world.rank == 0 and self._all_written(writing.folder):
                writing.commit()
        except Exception as error:  # whatever it is: the other ranks wait to hear of it
            self._failure = writing.describe(error)
        self._finished = self.clock()

    def _all_written(self, folder: Path) -> bool:
        marks = [folder / f"{WRITTEN}{rank}" for rank in range(self._world.size)]
        while not all(mark.exists() for mark in marks):
            if self._abandoned.wait(LOOK_SECONDS):
                return False
        for mark in marks:
            mark.unlink()
        return True

