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
        for buffer, states in ((self._key_buffer, key_states), (self._value_buffer, value_states)):
            buffer.narrow(2, start, end - start).copy_(states)
        self.keys, self.values = self._key_buffer.narrow(2, 0, end), self._value_buffer.narrow(2, 0, end)
        return self.keys, self.values

    def keep(self, rows: Tensor) -> None:
        """Only these rows (R,) from now on."""
        self._key_buffer, self._value_buffer = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        self.keys, self.values = self._key_buffer, self._value_buffer


def _with_room(states: Tensor, positions: int) -> Tensor:
    buffer = states.new_empty((*states.shape[:2], positions, states.shape[-1]))
    buffer[:, :, : states.shape[-2]] = states
    return buffer


class SlotLayer(DynamicLayer):
    """Keys and values (R, heads, S, dim) of a fixed size, in which every row writes at a place of its own and sees what its mask lets it see.

    So a row's arithmetic has the same shapes however long its neighbours are, and a row may begin while they are half done.
    """

    def __init__(self, keys: Tensor, values: Tensor, rows: int, positions: int) -> None:
        """`keys`, `values`: of any row, for the shape. Empty slots hold zeros: what is masked is multiplied by 0, so it has to be a number."""
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.keys = keys.new_zeros(rows, keys.shape[1], positions, keys.shape[3])
        self.values = values.new_zeros(rows, values.shape[1], positions, values.shape[3])
        self.is_initialized = True
        self.at = torch.zeros(rows, dtype=torch.int64, device=keys.device)
        """(R,) where each row writes next; set by the owner"""
        self._rows = torch.arange(rows, device=keys.device)

    def put(self, row: int, keys: Tensor, values: Tensor) -> None:
        """A prompt's keys and values (heads, width, dim) at the beginning of a row."""
        self.keys[row, :, : keys.shape[1]] = keys
        self.values[row, :, : values.shape[1]] = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.keys[self._rows, :, self.at] = key_states[:, :, 0]
        self.values[self._rows, :, self.at] = value_states[:, :, 0]
        return self.keys, self.values

    def keep(self, rows: Tensor) -> None:
        """Only these rows (R,) from now on."""
        self.keys, self.values, self.at = self.keys.index_select(0, rows), self.values.index_select(0, rows), self.at[rows]
        self._rows = self._rows[: len(rows)]

    def get_seq_length(self) -> int:
        """As if the newest token were the last of all, so that causality masks nothing and the row masks decide."""
        return self.keys.shape[-2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[-2], 0


def slots_like(cache: DynamicCache, rows: int, positions: int) -> DynamicCache:
    """An empty cache of `rows` x `positions` with the layers of a prefilled one. MachineError for layers whose reach depends on the position."""
    slots = DynamicCache()
    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise MachineError(
                f"the hf engine cannot refill rows of a cache layer of the kind {type(layer).__name__}", hint="set `rollout.hf.continuous: false`"
            )
        slots.layers.append(SlotLayer(layer.keys, layer.values, rows, positions))
    return slots


def keep_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Only these rows (R,) from now on, of an `expanded` cache or of slots."""
    for layer in cache.layers:
        if isinstance(layer, (GrowingLayer, SlotLayer)):
            layer.keep(rows)
        else:
            layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)


def expanded(caches: Sequence[DynamicCache], rows: Tensor, start: int = 0) -> DynamicCache:
    """One cache with a row for each entry of `rows` (R,): its index among all rows of `caches`, which hold equally many positions each, from `start`
    on."""
    whole = caches[0]
    for number, layer in enumerate(whole.layers):
        parts = [cache.layers[number] for cache in caches]
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise MachineError(
                f"the hf engine cannot copy a cache layer of the kind {type(layer).__name__}", hint="this model family needs another `rollout.engine`"
            )
        keys = torch.cat([part.keys[:, :, start:] for part in parts]).index_select(0, rows)
        values = torch.cat([part.values[:, :, start:] for part in parts]).index_select(0, rows)
        if type(layer) is DynamicLayer:
            whole.layers[number] = GrowingLayer(keys, values)
        else:
            layer.keys, layer.values = keys, values
    return whole
