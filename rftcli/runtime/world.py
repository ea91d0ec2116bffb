"""The other ranks. The only file that touches a process group.

Numbers and small objects travel over gloo on the host, on GPUs too: what every rank must agree on never waits for a device.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
"""A rank that waits longer for the others fails; a rank that dies is noticed at once by the launcher."""


class SoloWorld:
    """A world of one. Ships for tests and for work in one process."""

    rank = 0
    size = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def max(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self, name: str) -> None:
        return None


class TorchWorld:
    """All ranks of a job. Created once per process, after `join`."""

    def __init__(self, rank: int, size: int) -> None:
        import torch.distributed as dist

        self.rank = rank
        self.size = size
        self._dist = dist
        self._host = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Added in rank order, so every rank has the same bits."""
        return [sum(column) for column in zip(*self._all(values), strict=True)]

    def max(self, values: Sequence[float]) -> list[float]:
        return [max(column) for column in zip(*self._all(values), strict=True)]

    def _all(self, values: Sequence[float]) -> list[list[float]]:
        import torch

        mine = torch.tensor([float(value) for value in values], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._dist.all_gather(parts, mine, group=self._host)
        return [part.tolist() for part in parts]

    def gather(self, value: Any) -> list[Any]:
        parts: list[Any] = [None] * self.size
        self._dist.all_gather_object(parts, value, group=self._host)
        return parts

    def barrier(self, name: str) -> None:
        """`name` says in a stack dump what is waited for."""
        self._dist.barrier(group=self._host)


def join(backend: str, rendezvous: Path | None) -> TorchWorld:
    """Join the job that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK) and return its world.

    On one machine the ranks meet through a file in the attempt's directory, so no port can be taken by somebody else. `rendezvous` None: through
    MASTER_ADDR and MASTER_PORT.
    """
    import torch
    import torch.distributed as dist

    rank, size, local = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
    if backend == "nccl":
        torch.cuda.set_device(local)
    method = None if rendezvous is None else f"file://{rendezvous}"
    dist.init_process_group(backend, init_method=method or "env://", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    return TorchWorld(rank, size)


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
