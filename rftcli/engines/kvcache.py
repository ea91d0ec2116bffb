"""The key-value cache of the hf engine: prompts are prefilled once, their cache is copied to the rows that continue them, and then it grows in place.

What it leaves out: caches that are not keys and values per position (state-space and linear-attention layers); such models need another engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rftcli.errors import MachineError

GROWTH_TOKENS = 128
"""Positions added at a time. The library's own layer copies the whole cache for every token."""


class GrowingLayer(DynamicLayer):
    """Keys and values (R, heads, positions, dim) in a buffer with room, so that a token is written and not concatenated."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self._key_buffer, self._value_buffer = keys, values
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._key_buffer.shape[-2]:
            self._key_buffer = _with_room(self.keys, end + GROWTH_TOKENS)
            self._value_buffer = _with_room(self.values, end + GROWTH_TOKENS)
        self._key_buffer[:, :, start:end] = key_states
        self._value_buffer[:, :, start:end] = value_states
        self.keys, self.values = self._key_buffer[:, :, :end], self._value_buffer[:, :, :end]
        return self.keys, self.values


def _with_room(states: Tensor, positions: int) -> Tensor:
    buffer = states.new_empty((*states.shape[:2], positions, states.shape[-1]))
    buffer[:, :, : states.shape[-2]] = states
    return buffer


def expanded(caches: Sequence[DynamicCache], rows: Tensor) -> DynamicCache:
    """One cache with a row for each entry of `rows` (R,): its index among all rows of `caches`, which hold equally many positions each."""
    whole = caches[0]
    for number, layer in enumerate(whole.layers):
        parts = [cache.layers[number] for cache in caches]
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise MachineError(
                f"the hf engine cannot copy a cache layer of the kind {type(layer).__name__}", hint="this model family needs another `rollout.engine`"
            )
        keys = torch.cat([part.keys for part in parts]).index_select(0, rows)
        values = torch.cat([part.values for part in parts]).index_select(0, rows)
        if type(layer) is DynamicLayer:
            whole.layers[number] = GrowingLayer(keys, values)
        else:
            layer.keys, layer.values = keys, values
    return whole
