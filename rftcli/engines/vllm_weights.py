"""Weights from the trainer into a running vLLM engine, in place, and the proof that they arrived.

Names are those of the model's files, which vLLM's loaders know: what transformers renames or joins at load is undone (`file_form`). Two ways in:

- `load_weights` of vLLM's model, tensor by tensor, where a parameter is used as it was loaded (plain layers on a GPU);
- the worker's `reload_weights`, where something was made of it at load: on a CPU linear layers are packed, experts are reordered, latent attention
  keeps products. It makes all of that anew.

On a CPU a head that shares the embedding's weight has a packed copy of its own, which `reload_weights` leaves as it was; it is packed anew here.

The proof sums the bits of every number as integers: exact, in any order, and the same for fused and unfused layers. Packed layers are read back by
multiplying with the identity. It shows that both sides hold the same numbers, not that each is in its right place: that the log-probs show.

What it leaves out: when to do it, and engines that hold a part of the weights (tensor parallel) or other numbers (quantised).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rftcli.errors import RftError
from rftcli.protocols import Weights

DERIVING = ("MoE", "MLA", "MultiHeadLatent")
"""Parts of names of vLLM's layers that make something of their weights at load, on any device."""
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


def push(llm: Any, weights: Weights, *, dtype: torch.dtype, model: Any, check: bool) -> None:
    """Load full tensors, by their names in `model` (the trainer's), into the engine. With `check`, RftError where it does not hold them then."""
    sent = Sums() if check else None
    engine = llm.apply_model(_itself)[0]
    told = outgoing(model, weights, dtype=dtype, sums=sent)
    take(engine, told, lambda tensors: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors}))
    if sent is not None:
        compare(sent, held_by(engine), fused_layers(engine))


def outgoing(model: Any, weights: Weights, *, dtype: torch.dtype, sums: Sums | None) -> Iterator[tuple[str, Tensor]]:
    """The trainer's side: names of the files, numbers of the engine's type; what is sent is added to `sums`."""
    for name, tensor in file_form(model, weights):
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if sums is not None and tensor.is_floating_point():
            sums.add(name, tensor)
        yield name, tensor


def take(engine: nn.Module, told: Iterable[tuple[str, Tensor]], reload: Callable[[Iterable[tuple[str, Tensor]]], Any]) -> None:
    """The engine's side: into its model, by `reload` (the worker's own) where something is made of weights at load. RftError for what is missing."""
    if derives(engine):
        reload(told)
        repack_shared(engine)
        return
    with torch.no_grad():
        loaded = engine.load_weights(told)
    lacking = set() if loaded is None else {name for name, _ in engine.named_parameters()} - set(loaded)
    if lacking:
        raise RftError(f"{len(lacking)} weights did not arrive in the engine, the first is `{min(lacking)}`")


def fused_layers(engine: nn.Module) -> Mapping[str, list[str]]:
    """vLLM's layer -> the trainer's layers in it."""
    return getattr(engine, "packed_modules_mapping", None) or {}


def _itself(model: nn.Module) -> nn.Module:
    return model


def derives(engine: nn.Module) -> bool:
    """Whether vLLM has made something of the weights that it loaded: packed layers, or layers of other kinds than plain ones."""
    for module in engine.modules():
        method = getattr(module, "quant_method", None)
        plain = method is None or type(method).__name__.startswith("Unquantized")
        if not plain or hasattr(module, "cpu_linear") or any(part in type(module).__name__ for part in DERIVING):
            return True
    return False


def repack_shared(engine: nn.Module) -> None:
    """Pack anew what has a packed copy beside a weight that is whole: embeddings and heads, which may share one weight."""
    for module in engine.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


@torch.no_grad()
def held_by(engine: nn.Module) -> Sums:
    """What the engine computes with: every parameter once, packed ones read back."""
    held, seen = Sums(), set()
    for prefix, module in engine.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.is_floating_point():
                continue
            seen.add(id(parameter))
            whole = parameter
            if name == "weight" and hasattr(module, "cpu_linear"):
                whole = parameter if parameter.numel() else _read_back(module, parameter)
            held.add(f"{prefix}.{name}" if prefix else name, whole)
        if hasattr(module, "cpu_linear") and module.weight.numel() and not _is_embedding(module):
            packed, weight = _read_back(module, module.weight), module.weight
            if not torch.equal(packed, weight):
                raise RftError(f"the engine's packed copy of `{prefix}.weight` is not its weight")
    return held


def _is_embedding(module: nn.Module) -> bool:
    """Looks rows up and multiplies with nothing."""
    return type(module).__name__ == "VocabParallelEmbedding"


def _read_back(module: nn.Module, like: Tensor) -> Tensor:
    """(N, K) the matrix of a packed linear layer: its products with the rows of the identity. Each is one product and zeros, so it is exact."""
    width = module.weight.shape[1] if module.weight.numel() else module.input_size_per_partition
    identity = torch.eye(width, dtype=like.dtype, device=like.device)
    return module.quant_method.apply(module, identity, None).T.contiguous()


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
        hint="this vLLM loads the model in a way that is not known here; rollout.engine: hf shares the trainer's own weights",
    )


def fused_name(name: str, fused: Mapping[str, list[str]]) -> str:
    pieces = name.split(".")
    for joined, parts in fused.items():
        pieces = [joined if piece in parts else piece for piece in pieces]
    return ".".join(pieces)


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
