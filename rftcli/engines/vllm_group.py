"""A process group of its own between the trainer and the workers of vLLM servers, for weights: rank 0 is the trainer, everybody else receives.

NCCL where both sides have GPUs, gloo on CPUs. It knows nothing of the trainer's own group, and waits are bounded: a peer that does not come is an
error, never a hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rftcli.errors import RftError

POLL_SECONDS = 0.001


def open_store(host: str, seconds: float) -> Any:
    """The trainer's side of the meeting place; its `port` was free and is held from now on."""
    return dist.TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False)


def find_store(host: str, port: int, seconds: float) -> Any:
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)


class Group:
    """Member `rank` of `size`. Opens when the others do; RftError where NCCL is wanted and not there."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, seconds: float) -> None:
        self.device, self._rank, self._seconds, self._store = device, rank, seconds, store
        limit = timedelta(seconds=seconds)
        if device.type == "cuda":
            if not dist.is_nccl_available():
                raise RftError("this torch has no NCCL", hint="`rollout.vllm.server.weights: files`")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, limit)

    def broadcast(self, tensor: torch.Tensor, alive: Callable[[], None] = lambda: None) -> torch.Tensor:
        """From rank 0 to all, in place. `alive` raises when the others will not come; RftError after the time limit."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._group.broadcast([tensor], options)
            end = time.monotonic() + self._seconds
            while not work.is_completed():
                alive()
                if time.monotonic() > end:
                    raise RftError(f"the other side took no weights for {self._seconds:g} s")
                time.sleep(POLL_SECONDS)
            work.wait()
        except RuntimeError as error:  # torch's, of a peer that is gone or a network that does not reach it
            alive()
            raise RftError(f"weights could not be broadcast: {str(error).splitlines()[0]}", hint="`rollout.vllm.server.weights: files`") from error
        return tensor

    def prove(self) -> None:
        """One number from rank 0 to all: NCCL connects at the first use, and its failures belong to the start of a run."""
        told = self.broadcast(torch.ones(1, device=self.device) if self._rank == 0 else torch.zeros(1, device=self.device))
        if told.item() != 1.0:
            raise RftError("a group for weights hands on other numbers than it was given", hint="`rollout.vllm.server.weights: files`")
