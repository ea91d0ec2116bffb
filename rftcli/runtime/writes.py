"""Writing now, or later from a copy: what a checkpoint's parts hand their files to.

A copy lies in host memory and shares what the original shares: tensors that are views of one storage are views of one copy, so `torch.save` writes
the same file. Leaves out who writes it when (`behind`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Writer(Protocol):
    def tensors(self, value: Any, path: Path, *, zipped: bool = True) -> None:
        """`torch.save` of `value`, which may change afterwards."""

    def call(self, action: Callable[[], None]) -> None:
        """An action whose data nobody changes."""


class Now:
    """Everything at once: errors are the caller's."""

    def tensors(self, value: Any, path: Path, *, zipped: bool = True) -> None:
        save_tensors(value, path, zipped=zipped)

    def call(self, action: Callable[[], None]) -> None:
        action()


class Later:
    """Copies, and keeps what is to be done."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []

    def tensors(self, value: Any, path: Path, *, zipped: bool = True) -> None:
        self.actions.append(partial(save_tensors, host_copy(value), path, zipped=zipped))

    def call(self, action: Callable[[], None]) -> None:
        self.actions.append(action)


NOW = Now()


def save_tensors(value: Any, path: Path, *, zipped: bool = True) -> None:
    """OSError or RuntimeError where the disk is full: torch tells of it in its own words."""
    import torch  # a command that reads checkpoints needs none

    torch.save(value, path, _use_new_zipfile_serialization=zipped)


def host_copy(value: Any) -> Any:
    """`value` with every tensor and everything else that can change copied, into host memory."""
    import torch

    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[int, Any] = {}

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:  # what torch.save knows a storage by; an empty one has no address
            storages[storage._cdata] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        fresh = torch.empty(0, dtype=tensor.dtype)
        fresh.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        return fresh.requires_grad_(tensor.requires_grad)

    def of(item: Any) -> Any:
        if item is None or isinstance(item, (str, int, float, bool, bytes, torch.dtype, torch.device, torch.Size, type)):
            return item
        if id(item) not in memo:
            memo[id(item)] = of_one(item)
        return memo[id(item)]

    def of_one(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            fresh = of_tensor(item)
            for name, attribute in vars(item).items():  # DeepSpeed marks some of its own, and torch saves the marks
                setattr(fresh, name, of(attribute))
            return fresh
        if isinstance(item, MutableMapping):
            fresh = copy.copy(item)
            for key in item:
                fresh[key] = of(item[key])
            return fresh
        if isinstance(item, list):
            return [of(one) for one in item]
        if isinstance(item, tuple):
            return type(item)(*map(of, item)) if hasattr(item, "_fields") else tuple(map(of, item))
        return copy.deepcopy(item, memo)

    return of(value)
