"""Weights from the trainer into a running vLLM engine, in place, and the proof that they arrived.

Names are those of the model's files, which vLLM's loaders know (`weights.outgoing`). Two ways in:

- `load_weights` of vLLM's model, tensor by tensor, where a parameter is used as it was loaded (plain layers on a GPU);
- the worker's `reload_weights`, where something was made of it at load: on a CPU linear layers are packed, experts are reordered, latent attention
  keeps products. It makes all of that anew.

On a CPU a head that shares the embedding's weight has a packed copy of its own, which `reload_weights` leaves as it was; it is packed anew here.

The proof is the sum of bits of `weights`. Packed layers are read back by multiplying with the identity.

What it leaves out: when to do it, and engines that hold a part of the weights (tensor parallel) or other numbers (quantised).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rftcli.engines.weights import Sums, compare, outgoing
from rftcli.errors import RftError
from rftcli.protocols import Weights

DERIVING = ("MoE", "MLA", "MultiHeadLatent")
"""Parts of names of vLLM's layers that make something of their weights at load, on any device."""
QUIET = ("vllm.model_executor.model_loader.reload.layerwise", "vllm.model_executor.model_loader.reload.inplace")
"""They warn at every push of layers without weights of their own: rotary tables, a head that shares the embedding's."""


def quiet() -> None:
    """Of vLLM's process, once: what no push is to be told."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


def push(llm: Any, weights: Weights, *, dtype: torch.dtype, model: Any, check: bool, wrapped: bool = False) -> None:
    """Load full tensors, by their names in `model` (the trainer's), into the engine. With `check`, RftError where it does not hold them then.
    `wrapped`: as for `take`."""
    sent = Sums() if check else None
    engine = llm.apply_model(_itself)[0]
    told = outgoing(model, weights, dtype=dtype, sums=sent)
    take(engine, told, lambda tensors: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors}), wrapped=wrapped)
    if sent is not None:
        compare(sent, held_by(engine), fused_layers(engine))


def take(
    engine: nn.Module, told: Iterable[tuple[str, Tensor]], reload: Callable[[Iterable[tuple[str, Tensor]]], Any], *, wrapped: bool = False
) -> None:
    """The engine's side: into its model, by `reload` (the worker's own) where something is made of weights at load. `wrapped`: layers have places for
    an adapter; either they hand weights on, which only `reload` was seen to do, or what they wrap is called by its own name. RftError for what is
    missing."""
    inner = inner_names(engine) if wrapped else frozenset()
    if inner:
        told = ((_inside(name, inner), tensor) for name, tensor in told)
    if (wrapped and not inner) or derives(engine):
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


def inner_names(engine: nn.Module) -> frozenset[str]:
    """Last words of the names of layers whose weights lie one level deeper, around which vLLM has put a place for an adapter and through which it
    does not load. vLLM finds such layers by that word too."""
    around = [(name, module) for name, module in engine.named_modules() if "base_layer" in module._modules]
    ends = {name.rpartition(".")[2] for name, module in around if not hasattr(type(module), "load_weights")}
    return frozenset(ends.union(*(parts for fused, parts in fused_layers(engine).items() if fused in ends)))


def _inside(name: str, inner: frozenset[str]) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{layer}.base_layer.{kind}" if layer.rpartition(".")[2] in inner else name


def _itself(model: nn.Module) -> nn.Module:
    return model


def _plain(engine: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but those around one with a place for an adapter, which answer for what they wrap."""
    for name, module in engine.named_modules():
        if "base_layer" not in module._modules:
            yield name, module


def derives(engine: nn.Module) -> bool:
    """Whether vLLM has made something of the weights that it loaded: packed layers, or layers of other kinds than plain ones."""
    for _, module in _plain(engine):
        method = getattr(module, "quant_method", None)
        plain = method is None or type(method).__name__.startswith("Unquantized")
        if not plain or hasattr(module, "cpu_linear") or any(part in type(module).__name__ for part in DERIVING):
            return True
    return False


def repack_shared(engine: nn.Module) -> None:
    """Pack anew what has a packed copy beside a weight that is whole: embeddings and heads, which may share one weight."""
    for _, module in _plain(engine):
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


@torch.no_grad()
def held_by(engine: nn.Module) -> Sums:
    """What the engine computes with: every parameter once, packed ones read back."""
    held, seen = Sums(), set()
    for prefix, module in _plain(engine):
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
