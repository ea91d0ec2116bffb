"""Weights from the trainer into a running SGLang engine, and the proof that they arrived.

Tensors travel by the names of the model's files in buckets, as handles of memory that both processes see: nothing is copied through a pipe. A bucket
is one flat tensor where this SGLang takes such (`pack`), else a list of tensors. Releases that want a session around an update get one.

The proof is the sum of bits of `weights`: the engine's processes write theirs (`sglang_worker`) into a tensor of ours.

What it leaves out: when to do it, and engines that hold a part of the weights (tensor parallel) or other numbers (quantised).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rftcli.engines import sglang_worker
from rftcli.engines.weights import Sums, compare, outgoing
from rftcli.errors import RftError
from rftcli.protocols import Weights

BUCKET_BYTES = 256 * 2**20
"""Of one message: with fewer, an engine's answers take longer than its copies."""
Pack = Callable[[list[tuple[str, Tensor]], int], list[Any]]
"""(named tensors of one type, number of the engine's parts) -> for each part what it unpacks as a flat bucket."""


def push(engine: Any, weights: Weights, *, dtype: torch.dtype, device: torch.device, model: Any, check: bool, pack: Pack | None, parts: int) -> None:
    """Load full tensors, by their names in `model` (the trainer's), into all `parts` of the engine. RftError where they did not arrive, and with
    `check` where the engine does not hold them then."""
    sent = Sums() if check else None
    told = outgoing(model, weights, dtype=dtype, sums=sent, device=device)
    with _session(engine):
        for bucket in buckets(told, BUCKET_BYTES):
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # another process reads what was just written
            if pack is None:
                answer = engine.update_weights_from_tensor(bucket, load_format=None, flush_cache=False)
            else:
                answer = engine.update_weights_from_tensor(pack(bucket, parts), load_format="flattened_bucket", flush_cache=False)
            _accepted(answer)
        if sent is not None:
            compare(sent, _held(engine, device), {})
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # handles that the engine has let go of


def buckets(named: Iterator[tuple[str, Tensor]], most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """As many tensors of one type as stay within `most_bytes`, one at least."""
    kept: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        own = tensor.numel() * tensor.element_size()
        if kept and (size + own > most_bytes or tensor.dtype != kept[-1][1].dtype):
            yield kept
            kept, size = [], 0
        kept.append((name, tensor))
        size += own
    if kept:
        yield kept


def _held(engine: Any, device: torch.device) -> Sums:
    place = torch.zeros(1, dtype=torch.int64, device=device)
    if device.type == "cpu":
        place.share_memory_()
    _accepted(engine.update_weights_from_tensor([("sum of bits", place)], load_format=sglang_worker.NAME, flush_cache=False))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Sums({"all": int(place) % 2**64})


@contextmanager
def _session(engine: Any) -> Iterator[None]:
    """Around an update, where this SGLang asks for one. A push that broke off is closed as well: the next one could not begin otherwise."""
    begin, end = getattr(engine, "begin_weight_update", None), getattr(engine, "end_weight_update", None)
    if begin is None or end is None:
        yield
        return
    _accepted(begin())
    try:
        yield
    except RftError:
        end()
        raise
    _accepted(end())


def _accepted(answer: Any) -> None:
    """Of a call that answers (did it work, what it says)."""
    worked, text = answer
    if not worked:
        raise RftError(f"SGLang did not take the weights: {text}", hint="its log above says more; `rollout.engine: hf` shares the trainer's weights")
