"""The trainer's side of a push of weights to engines in other processes: what the workers are told, and who waits for whom.

A push is never repeated by itself: an engine that failed in the middle of one holds neither the old weights nor the new ones. Every way first tells
the workers to take weights (they answer when they have them), then sends. Leaves out how buckets travel (`vllm_stream`) and when to push.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from rftcli.engines.vllm_group import Group, open_store
from rftcli.engines.vllm_http import Server, Wire
from rftcli.engines.vllm_stream import GroupWay, SocketWay, send, write_folder
from rftcli.errors import RftError

Answers = list[dict[str, Any]]
ROOM = "`rollout.vllm.server.folder` where there is room for the whole model, and the servers see it; or `weights: nccl`"


class Push(Protocol):
    """One way to every server of a rank."""

    def __call__(self, tensors: Iterable[tuple[str, torch.Tensor]], told: Mapping[str, Any]) -> list[Answers]:
        """Send all; the workers' answers, server by server. RftError, naming the server, where one did not take them."""

    def close(self) -> None: ...


class FilesPush:
    """Through a folder that the servers see too; it is removed afterwards, whatever happened."""

    def __init__(self, wire: Wire, servers: Sequence[Server], folder: Path) -> None:
        self._wire, self._servers, self._folder = wire, servers, folder

    def __call__(self, tensors: Iterable[tuple[str, torch.Tensor]], told: Mapping[str, Any]) -> list[Answers]:
        folder = self._folder / f"version_{told['version']:06d}"
        shutil.rmtree(folder, ignore_errors=True)  # of a push that was cut off
        try:
            self._write(tensors, folder)
            asked = {**told, "way": "files", "folder": str(folder)}
            return collected(self._wire, [self._wire.rpc_later(server, "rft_take", asked) for server in self._servers])
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
        try:
            write_folder(tensors, folder)
        except (OSError, SafetensorError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            message = f"weights could not be written to {self._folder} on their way to the servers: {why}"
            raise RftError(message, hint=ROOM) from error

    def close(self) -> None:
        """Nothing stays."""
        shutil.rmtree(self._folder, ignore_errors=True)


class GroupPush:
    """Broadcast over a group of this process and all workers of all servers. `host`: how the servers reach this machine."""

    def __init__(self, wire: Wire, servers: Sequence[Server], host: str, device: torch.device) -> None:
        self._wire, self._servers = wire, servers
        seconds = wire.timeout_seconds
        size = 1 + sum(server.workers for server in servers)
        self._store = open_store(host, seconds)
        firsts = [1 + sum(server.workers for server in servers[:place]) for place in range(len(servers))]
        asked = [{"host": host, "port": self._store.port, "first": first, "size": size, "seconds": seconds} for first in firsts]
        joining = [wire.rpc_later(server, "rft_join", one) for server, one in zip(servers, asked, strict=True)]
        try:
            self._group = Group(self._store, 0, size, device, seconds)
            self._group.prove()
        except (RuntimeError, RftError) as error:  # the others did not come: theirs says more, where there is one
            collected(wire, joining)
            raise RftError(f"no group for weights with the vLLM servers: {error}", hint="`rollout.vllm.server.weights: files`") from error
        collected(wire, joining)

    def __call__(self, tensors: Iterable[tuple[str, torch.Tensor]], told: Mapping[str, Any]) -> list[Answers]:
        taking = [self._wire.rpc_later(server, "rft_take", {**told, "way": "group"}) for server in self._servers]
        send(tensors, GroupWay(self._group, lambda: refuse_failed(taking)))
        return collected(self._wire, taking)

    def close(self) -> None:
        """The group ends with the process: its peers may be gone already."""


class SocketPush:
    """To the worker on the same device, from every rank of the engine; the first of them (`leads`) tells the workers. `sockets`: of all these ranks,
    in order."""

    def __init__(self, wire: Wire, server: Server, way: SocketWay, sockets: Sequence[str], *, leads: bool) -> None:
        self._wire, self._server, self._way, self._sockets, self._leads = wire, server, way, sockets, leads

    def __call__(self, tensors: Iterable[tuple[str, torch.Tensor]], told: Mapping[str, Any]) -> list[Answers]:
        asked = {**told, "way": "socket", "sockets": list(self._sockets)}
        taking = [self._wire.rpc_later(self._server, "rft_take", asked)] if self._leads else []
        try:
            self._way.meet(lambda: refuse_failed(taking))
            send(tensors, self._way)
        except RftError:
            refuse_failed(taking, wait_seconds=2.0)  # the worker's own words say more
            raise
        return collected(self._wire, taking)

    def close(self) -> None:
        self._way.close()


def refuse_failed(taking: Sequence[Future[Answers]], wait_seconds: float = 0.0) -> None:
    """RftError of the first that has failed already."""
    end = time.monotonic() + wait_seconds
    while wait_seconds and time.monotonic() < end and not any(one.done() for one in taking):
        time.sleep(0.05)
    for one in taking:
        if one.done():
            one.result()


def collected(wire: Wire, taking: Sequence[Future[Answers]]) -> list[Answers]:
    """All answers; each call has a time limit of its own, with the server's name in its error."""
    try:
        return [one.result(timeout=2 * wire.timeout_seconds + 60.0) for one in taking]
    except Late as error:
        raise RftError("a vLLM server did not answer to new weights") from error


