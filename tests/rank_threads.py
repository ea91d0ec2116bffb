"""Ranks as threads of one process: a `World` for tests that need several ranks and no process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rftcli.errors import RftError
from rftcli.runtime.parcels import packed, unpacked


class ThreadWorld:
    """One rank of a `World` whose ranks are threads."""

    def __init__(self, rank: int, shared: SimpleNamespace) -> None:
        self.rank = rank
        self.size: int = shared.barrier.parties
        self._shared = shared

    def gather(self, value: Any) -> list[Any]:
        self._shared.values[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        return values

    def exchange(self, parcels: Sequence[Any]) -> list[Any]:
        mine = [row[self.rank] for row in self.gather(list(parcels))]
        return [parcel if rank == self.rank else unpacked(packed(parcel)) for rank, parcel in enumerate(mine)]

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(sum(column)) for column in zip(*self.gather(list(values)), strict=True)]

    def max(self, values: Sequence[float]) -> list[float]:
        return [float(max(column)) for column in zip(*self.gather(list(values)), strict=True)]

    def barrier(self, name: str) -> None:
        self._shared.barrier.wait()


def ends_on_ranks(size: int, work: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What `work` returned on each of `size` ranks, or the error it raised there. An error on one rank ends the others' waiting."""
    shared = SimpleNamespace(barrier=threading.Barrier(size, timeout=120), values=[None] * size)
    ends: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            ends[rank] = work(ThreadWorld(rank, shared))
        except BaseException as error:
            ends[rank] = error
            if not isinstance(error, RftError):  # those are agreed on: every rank raises them
                shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def on_ranks(size: int, work: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What `work` returns on each of `size` ranks; the first error that is no broken wait is raised here."""
    ends = ends_on_ranks(size, work)
    errors = sorted((end for end in ends if isinstance(end, BaseException)), key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return ends
