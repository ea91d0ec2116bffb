"""Weights into an engine whose layers have places for an adapter, as vLLM builds them: some hand weights on, some are looked through by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from rftcli.engines.vllm_weights import derives, held_by, inner_names, take
from rftcli.engines.weights import Sums, compare
from rftcli.errors import RftError


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


class HandsOn(Around):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        raise AssertionError("the worker's own way calls it")


class Block(nn.Module):
    def __init__(self, around: type[Around]) -> None:
        super().__init__()
        self.qkv_proj = around(nn.Linear(2, 6, bias=True))
        self.o_proj = around(nn.Linear(2, 2, bias=False))
        self.norm = nn.LayerNorm(2, bias=False)


class Engine(nn.Module):
    """Loads by name, and queries, keys and values into one matrix."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, around: type[Around]) -> None:
        super().__init__()
        self.embed_tokens = around(nn.Embedding(3, 2))
        self.layers = nn.ModuleList([Block(around)])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, found = dict(self.named_parameters()), set()
        for name, tensor in weights:
            for place, part in enumerate(("q_proj", "k_proj", "v_proj")):
                if f".{part}." in name:
                    name = name.replace(part, "qkv_proj")
                    own[name][2 * place : 2 * place + 2].copy_(tensor)
                    break
            else:
                own[name].copy_(tensor)
            found.add(name)
        return found


SHAPES = {
    "embed_tokens.weight": (3, 2), "layers.0.q_proj.weight": (2, 2), "layers.0.k_proj.weight": (2, 2),
    "layers.0.v_proj.weight": (2, 2), "layers.0.q_proj.bias": (2,), "layers.0.k_proj.bias": (2,),
    "layers.0.v_proj.bias": (2,), "layers.0.o_proj.weight": (2, 2), "layers.0.norm.weight": (2,),
}  # fmt: skip


def told(sums: Sums | None = None, without: str = "") -> Iterator[tuple[str, Tensor]]:
    for number, (name, shape) in enumerate(SHAPES.items()):
        if name != without:
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            if sums is not None:
                sums.add(name, tensor)
            yield name, tensor


def never(_: Iterable[tuple[str, Tensor]]) -> None:
    raise AssertionError("plain layers are written in place")


def test_layers_that_do_not_hand_on_are_called_by_the_name_of_what_they_wrap() -> None:
    engine, sent = Engine(Around), Sums()
    assert not derives(engine)
    assert inner_names(engine) == {"embed_tokens", "qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    take(engine, told(sent), never, wrapped=True)
    compare(sent, held_by(engine), engine.packed_modules_mapping)
    expected = dict(told())
    assert torch.equal(engine.embed_tokens.base_layer.weight, expected["embed_tokens.weight"])
    assert torch.equal(engine.layers[0].qkv_proj.base_layer.bias[2:4], expected["layers.0.k_proj.bias"])


def test_layers_that_hand_on_get_the_names_of_the_files() -> None:
    engine, got = Engine(HandsOn), []
    assert inner_names(engine) == frozenset()
    take(engine, told(), lambda tensors: got.extend(name for name, _ in tensors), wrapped=True)
    assert got == [name for name, _ in told()]


def test_what_does_not_arrive_behind_a_place_for_an_adapter_is_an_error() -> None:
    with pytest.raises(RftError, match=r"1 weights did not arrive .*embed_tokens\.base_layer\.weight"):
        take(Engine(Around), told(without="embed_tokens.weight"), never, wrapped=True)
