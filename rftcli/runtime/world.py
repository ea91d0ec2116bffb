"""The other ranks. The only file that touches a process group.

Numbers and small objects travel over gloo on the host, on GPUs too: what every rank must agree on never waits for a device.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcli.errors import RftError

MEET_SECONDS = 600.0
"""From the first rank to the last: they import the same packages, but not from disks of the same speed."""


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

    def exchange(self, parcels: Sequence[Any]) -> list[Any]:
        return list(parcels)

    def barrier(self, name: str) -> None:
        return None


class TorchWorld:
    """All ranks of a job. Created once per process, after `join`."""

    def __init__(self, rank: int, size: int, timeout: datetime.timedelta) -> None:
        import torch.distributed as dist

        self.rank = rank
        self.size = size
        self._dist = dist
        self._host = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout)

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

    def exchange(self, parcels: Sequence[Any]) -> list[Any]:
        """Each parcel travels to one rank alone, and the sizes before it."""
        import torch

        from rftcli.runtime.parcels import packed, unpacked

        own = self.rank
        sent = [b"" if rank == own else packed(parcel) for rank, parcel in enumerate(parcels)]
        sizes = torch.tensor([len(part) for part in sent], dtype=torch.int64)
        expected = torch.empty_like(sizes)
        self._dist.all_to_all_single(expected, sizes, group=self._host)
        lengths = expected.tolist()
        outgoing = torch.frombuffer(bytearray(b"".join(sent)) or bytearray(1), dtype=torch.uint8)[: sum(map(len, sent))]
        incoming = torch.empty(sum(lengths), dtype=torch.uint8)
        self._dist.all_to_all_single(incoming, outgoing, lengths, sizes.tolist(), group=self._host)
        data, start, found = memoryview(incoming.numpy()), 0, []
        for rank, length in enumerate(lengths):
            found.append(parcels[own] if rank == own else unpacked(data[start : start + length]))
            start += length
        return found

    def barrier(self, name: str) -> None:
        """`name` says in a stack dump what is waited for."""
        self._dist.barrier(group=self._host)


def join(backend: str, meeting: Meeting | Path, timeout_minutes: float = 30.0) -> TorchWorld | SoloWorld:
    """Join the job that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK) and return its world. A rank that waits longer than
    `timeout_minutes` for the others fails; one that dies is noticed at once by whoever watches its process. A path is a file to meet in."""
    import torch
    import torch.distributed as dist

    rank, size, local = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
    if backend == "nccl":
        torch.cuda.set_device(local)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if isinstance(meeting, Path):
        meeting = Meeting(method=f"file://{meeting}", note=meeting)
    where: dict[str, Any] = {"store": _store(meeting.note, meeting.address, rank, size)} if meeting.address else {"init_method": meeting.method}
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **where)
    return TorchWorld(rank, size, timeout) if size > 1 else SoloWorld()  # what nobody else has to hear need not be sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where ranks find each other. On one machine: a file in the attempt's folder, so that no port can be taken by somebody else. In a job of a
    launcher that has chosen one: MASTER_ADDR and MASTER_PORT. Else `address` is that of rank 0's machine, which takes a free port, holds it and
    writes it into `note` for the others."""

    method: str
    note: Path
    address: str | None = None


def _store(note: Path, address: str, rank: int, size: int) -> Any:
    import torch.distributed as dist

    patience = datetime.timedelta(seconds=MEET_SECONDS)
    if rank == 0:
        store = dist.TCPStore(address, 0, size, is_master=True, timeout=patience, wait_for_workers=False)
        fresh = note.with_name(f".{note.name}")
        fresh.write_text(json.dumps({"address": address, "port": store.port}), encoding="utf-8")
        fresh.replace(note)
        return store
    deadline = time.monotonic() + MEET_SECONDS
    while not note.exists():
        if time.monotonic() > deadline:
            raise RftError(f"rank 0 did not open a port within {MEET_SECONDS:.0f} s", hint="look at its log")
        time.sleep(0.1)
    told = json.loads(note.read_text(encoding="utf-8"))
    return dist.TCPStore(told["address"], told["port"], size, is_master=False, timeout=patience)


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
