"""Weights on their way to an engine in another process, a bucket at a time. Both sides use this file: the trainer fills and sends, the engine's
worker (`vllm_worker`) receives.

    group    over a process group of its own: to servers on other GPUs or machines
    socket   one flat buffer that both processes see, by CUDA IPC on a GPU and as a mapped file on a CPU; a local socket says what is in it
    files    a folder of safetensors on a file system that both sides see

A tensor is copied into its bucket at once: a gathered one is whole for one turn of the loop. What it leaves out: what becomes of the tensors.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rftcli.errors import RftError

BUCKET_BYTES = 256 << 20
SHARD_BYTES = 1 << 30
ALIGN = 16
"""Bytes; every number type may start there."""
MANIFEST = "manifest.json"
SHARED_PLACES = ("/dev/shm", tempfile.gettempdir())
"""Where a buffer that two processes map may lie: in memory, or else on a disk."""
_LENGTH = struct.Struct("!Q")
Header = list[tuple[str, str, list[int], int]]
"""(name, number type, shape, offset in bytes) of every tensor of a bucket."""


class Way(Protocol):
    """How buckets travel."""

    def room(self, size: int) -> Tensor:
        """(at least size,) uint8: space for the next bucket."""

    def send(self, header: Header, used: int) -> None:
        """Hand over the first `used` bytes; the space may be filled again when it returns."""

    def end(self) -> None:
        """No more buckets."""


def send(tensors: Iterable[tuple[str, Tensor]], way: Way, limit: int = BUCKET_BYTES) -> None:
    """All tensors, in buckets of `limit` bytes or of one larger tensor."""
    space, header, used = way.room(limit), [], 0
    for name, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        size = flat.numel()
        if header and used + size > space.numel():
            way.send(header, used)
            header, used = [], 0
        if size > space.numel():
            space = way.room(size)
        space[used : used + size].copy_(flat)
        header.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), used))
        used = min(space.numel(), -(-(used + size) // ALIGN) * ALIGN)
    if header:
        way.send(header, used)
    way.end()


def unpacked(header: Header, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of it."""
    for name, kind, shape, at in header:
        dtype = getattr(torch, kind)
        size = dtype.itemsize * torch.Size(shape).numel()
        yield name, flat[at : at + size].view(dtype).view(shape)


def received(buckets: Iterable[tuple[Header, Tensor]], *, copies: bool) -> Iterator[tuple[str, Tensor]]:
    """What the engine loads. `copies`: it keeps tensors for longer than one turn, and the next bucket takes their place."""
    for header, flat in buckets:
        for name, tensor in unpacked(header, flat):
            yield name, tensor.clone() if copies else tensor


class GroupWay:
    """Over `vllm_group.Group`. `alive` raises when the receivers have failed."""

    def __init__(self, group: Any, alive: Callable[[], None]) -> None:
        self._group, self._alive = group, alive
        self._flat = torch.empty(0, dtype=torch.uint8)

    def room(self, size: int) -> Tensor:
        self._flat = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        return self._flat

    def send(self, header: Header, used: int) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(self._group.device)
        for tensor in (torch.tensor([text.numel(), used], device=self._group.device), text, self._flat[:used]):
            self._group.broadcast(tensor, self._alive)

    def end(self) -> None:
        self._group.broadcast(torch.zeros(2, dtype=torch.int64, device=self._group.device), self._alive)


def from_group(group: Any) -> Iterator[tuple[Header, Tensor]]:
    """The receiving side."""
    while True:
        length, used = group.broadcast(torch.zeros(2, dtype=torch.int64, device=group.device)).tolist()
        if not length:
            return
        text = group.broadcast(torch.empty(length, dtype=torch.uint8, device=group.device))
        flat = group.broadcast(torch.empty(used, dtype=torch.uint8, device=group.device))
        yield json.loads(bytes(text.cpu().numpy())), flat


class SocketWay:
    """To a process on the same machine and device. Falls back from CUDA IPC to a mapped file, told through `warn`, where either side refuses it.

    The socket lies in a folder of this user alone: what comes through it is trusted.
    """

    def __init__(self, device: torch.device, seconds: float, warn: Callable[[str], None]) -> None:
        self._device, self._seconds, self._warn = device, seconds, warn
        self._ipc = device.type == "cuda"
        self._folder = Path(tempfile.mkdtemp(prefix="rft-weights-"))
        self.path = str(self._folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._peer: socket.socket | None = None
        self._flat, self._handle = torch.empty(0, dtype=torch.uint8), None
        self._file: Path | None = None

    def meet(self, alive: Callable[[], None]) -> None:
        """Wait for the worker to come for this push. `alive` raises when it will not."""
        self._listener.settimeout(0.1)
        end = time.monotonic() + self._seconds
        while True:
            try:
                self._peer, _ = self._listener.accept()
                break
            except TimeoutError:
                alive()
                if time.monotonic() > end:
                    raise RftError(f"the engine did not come for its weights within {self._seconds:g} s") from None
        self._peer.settimeout(self._seconds)

    def room(self, size: int) -> Tensor:
        if self._flat.numel() >= size and self._handle is not None:
            return self._flat
        if self._ipc:
            from torch.multiprocessing.reductions import reduce_tensor

            self._flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            try:
                self._handle = ("ipc", reduce_tensor(self._flat)[1])
                return self._flat
            except RuntimeError as error:
                self._give_up_ipc(str(error))
        self._map(size)
        return self._flat

    def send(self, header: Header, used: int) -> None:
        assert self._peer is not None
        if self._flat.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        reply = self._exchange((header, used, self._handle))
        if reply is not None and self._ipc:
            self._give_up_ipc(reply)
            filled = self._flat
            self._map(filled.numel())
            self._flat[:used].copy_(filled[:used])
            reply = self._exchange((header, used, self._handle))
        if reply is not None:
            raise RftError(f"the engine could not read a bucket of weights: {reply}")
        self._drop_file()  # both sides have mapped it

    def end(self) -> None:
        assert self._peer is not None
        write_frame(self._peer, None)
        self._peer.close()
        self._peer = None

    def close(self) -> None:
        for one in (self._peer, self._listener):
            if one is not None:
                one.close()
        self._drop_file()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _exchange(self, message: Any) -> str | None:
        assert self._peer is not None
        try:
            write_frame(self._peer, message)
            return read_frame(self._peer)
        except (OSError, EOFError) as error:
            raise RftError(f"the engine took no weights any more: {type(error).__name__} {error}".strip()) from error

    def _give_up_ipc(self, why: str) -> None:
        self._ipc = False
        self._warn(f"CUDA IPC is not available between trainer and engine ({why.splitlines()[0][:200]}); weights go through the machine's memory")

    def _map(self, size: int) -> None:
        self._drop_file()
        self._file = reserved(size)
        self._flat = torch.from_file(str(self._file), shared=True, size=size, dtype=torch.uint8)
        self._handle = ("file", (str(self._file), size))

    def _drop_file(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


def from_socket(path: str, device: torch.device, kept: dict[str, Any], seconds: float) -> Iterator[tuple[Header, Tensor]]:
    """The receiving side. `kept` remembers the buffer between pushes: its file has no name any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(seconds)
        peer.connect(path)
        while (message := read_frame(peer)) is not None:
            header, used, handle = message
            try:
                if kept.get("handle") != handle:
                    kept.update(handle=handle, flat=_opened(handle, device))
            except Exception as error:  # torch refuses a handle with errors of many kinds; the sender knows another way
                write_frame(peer, f"{type(error).__name__}: {error}")
                continue
            yield header, kept["flat"][:used]
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            write_frame(peer, None)


def _opened(handle: tuple[str, Any], device: torch.device) -> Tensor:
    kind, told = handle
    if kind == "file":
        path, size = told
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(told)
    arguments[6] = device.index or 0  # the device by this process's own count
    return rebuild_cuda_tensor(*arguments)


def reserved(size: int) -> Path:
    """A file of `size` bytes that are really there: in a full /dev/shm a mapped write would end the process. RftError where no place has room."""
    problem = ""
    for place in SHARED_PLACES:
        try:
            number, name = tempfile.mkstemp(prefix="rft-weights-", dir=place)
        except OSError as error:
            problem = f"{place}: {error.strerror}"
            continue
        try:
            os.posix_fallocate(number, 0, size)
            return Path(name)
        except OSError as error:
            Path(name).unlink()
            problem = f"{place}: {error.strerror}"
        finally:
            os.close(number)
    raise RftError(f"no room for {size >> 20} MiB of weights on their way to the engine ({problem})", hint="`rollout.vllm.process: inside`")


def write_frame(peer: socket.socket, message: Any) -> None:
    text = pickle.dumps(message)
    peer.sendall(_LENGTH.pack(len(text)) + text)


def read_frame(peer: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_read(peer, _LENGTH.size))
    return pickle.loads(_read(peer, length))


def _read(peer: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        piece = peer.recv(length - len(found))
        if not piece:
            raise EOFError("the other side has left")
        found += piece
    return bytes(found)


def write_folder(tensors: Iterable[tuple[str, Tensor]], folder: Path, limit: int = SHARD_BYTES) -> None:
    """Shards and a list of them, whole or not at all: written beside and renamed. OSError or SafetensorError where there is no room."""
    from safetensors.torch import save_file

    fresh = folder.with_name(f".{folder.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    shards: list[str] = []
    shard: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal size
        if shard:
            shards.append(f"weights_{len(shards):05d}.safetensors")
            save_file(shard, fresh / shards[-1])
            shard.clear()
            size = 0

    try:
        for name, tensor in tensors:
            bytes_of_it = tensor.numel() * tensor.element_size()
            if size + bytes_of_it > limit:
                flush()
            shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += bytes_of_it
        flush()
        (fresh / MANIFEST).write_text(json.dumps(shards), encoding="utf-8")
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def from_folder(folder: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The receiving side of `write_folder`. RftError where the folder is not seen from here."""
    from safetensors import safe_open

    if not (folder / MANIFEST).is_file():
        raise RftError(f"{folder} is not seen from {socket.gethostname()}", hint="`rollout.vllm.server.folder` on a file system that both sides see")
    for name in json.loads((folder / MANIFEST).read_text(encoding="utf-8")):
        with safe_open(folder / name, framework="pt", device=str(device)) as shard:
            for key in shard.keys():  # noqa: SIM118
                yield key, shard.get_tensor(key)
