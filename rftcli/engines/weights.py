"""Weights on their way from the trainer into another engine: by the names of the model's files, and with a sum of their bits.

Names are those that every engine's loader knows: what transformers renames or joins at load is undone (`file_form`). The proof that they arrived sums
the bits of every number as integers: exact, in any order, and the same for fused and unfused layers. It shows that both sides hold the same numbers,
not that each is in its right place: that the log-probs show.

What it leaves out: pushing, and reading an engine's own weights (`vllm_weights`, `sglang_weights`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rftcli.errors import RftError
from rftcli.protocols import Weights

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRAP = 2**64


@dataclass(slots=True)
class Sums:
    """Of the bits of tensors, by name, modulo 2^64."""

    by_name: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        self.by_name[name] = (self.by_name.get(name, 0) + bit_sum(tensor)) % _WRAP

    @property
    def total(self) -> int:
        return sum(self.by_name.values()) % _WRAP


def bit_sum(tensor: Tensor) -> int:
    """The sum of the bit patterns of all numbers, read as signed integers; both zeros count as the same."""
    plain = tensor.detach() + 0.0  # -0.0 + 0.0 is 0.0
    return int(plain.view(_BITS[plain.element_size()]).sum(dtype=torch.int64))


def compare(sent: Sums, held: Sums, fused: Mapping[str, list[str]]) -> None:
    """RftError where the sums over everything differ; it names a weight where names can be matched. `fused`: vLLM's layer -> the layers in it."""
    if sent.total == held.total:
        return
    expected: dict[str, int] = {}
    for name, value in sent.by_name.items():
        joined = fused_name(name, fused)
        expected[joined] = (expected.get(joined, 0) + value) % _WRAP
    wrong = [name for name, value in expected.items() if name in held.by_name and held.by_name[name] != value]
    shown = f"{len(wrong)} weights differ, the first is `{wrong[0]}`" if wrong else "the sums over all weights differ"
    raise RftError(
        f"the engine does not hold the trainer's weights: {shown}",
        hint="this engine loads the model in a way that is not known here; rollout.engine: hf shares the trainer's own weights",
    )


def fused_name(name: str, fused: Mapping[str, list[str]]) -> str:
    pieces = name.split(".")
    for joined, parts in fused.items():
        pieces = [joined if piece in parts else piece for piece in pieces]
    return ".".join(pieces)


def outgoing(
    model: Any, weights: Weights, *, dtype: torch.dtype, sums: Sums | None, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The trainer's side: names of the files, numbers of the engine's type; what is sent is added to `sums`. A gathered tensor is whole for one turn
    of the loop; with `device` they are copies there, which stay."""
    for name, tensor in file_form(model, weights):
        number = dtype if tensor.is_floating_point() else tensor.dtype
        tensor = tensor.to(number) if device is None else tensor.detach().to(device=device, dtype=number, copy=True)
        if sums is not None and tensor.is_floating_point():
            sums.add(name, tensor)
        yield name, tensor


def file_form(model: Any, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Weights and persistent buffers by the names, and in the pieces, that the model's files have. One layer at a time where transformers joins
    tensors at load (experts); else one tensor at a time, and nothing is copied."""
    from transformers import core_model_loading

    yield from _buffers(model)
    if not _converts(model):
        yield from weights
        return
    layer, kept = None, {}
    for name, tensor in weights:
        own = re.match(r".*?\.\d+\.", name)
        if kept and (own is None or own[0] != layer):
            yield from core_model_loading.revert_weight_conversion(model, kept).items()
            kept = {}
        layer = None if own is None else own[0]
        kept[name] = tensor.clone()  # a gathered tensor is whole for one turn of the loop
    if kept:
        yield from core_model_loading.revert_weight_conversion(model, kept).items()


def _converts(model: Any) -> bool:
    """Whether transformers changes names or tensors of this model between file and memory. Releases before 5 do not."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
        except ImportError:
            return False
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return bool(conversions)


def _buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong into a checkpoint: some routers keep a bias there."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name).replace(".base_layer", ""), buffer  # below an adapter


@torch.no_grad()
def copy_into(module: torch.nn.Module, weights: Weights) -> None:
    """Copy full tensors, by their state dict names, into a replica in place. RftError for an unknown name or shape, or what did not arrive."""
    targets = module.state_dict(keep_vars=True)
    arrived: set[int] = set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            raise RftError(f"weight `{name}` is unknown to the rollout model")
        if target.shape != tensor.shape:
            raise RftError(f"weight `{name}` has the shape {tuple(tensor.shape)}, the rollout model's is {tuple(target.shape)}")
        target.copy_(tensor)
        arrived.add(id(target))
    lacking = [name for name, parameter in module.named_parameters() if id(parameter) not in arrived]
    if lacking:
        raise RftError(f"{len(lacking)} weights did not arrive at the rollout model, the first is `{lacking[0]}`")
