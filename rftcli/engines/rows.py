"""Rows of the hf engine in the making: one sample, a batch of them, and a pool whose places are refilled.

What it leaves out: passes of the model, and the choice of tokens (`hf`, `sampling`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from rftcli.engines.finish import is_greedy
from rftcli.engines.kvcache import SlotLayer, keep_rows, slots_like
from rftcli.engines.noise import RowNoise, uniforms
from rftcli.engines.shaping import Shaping
from rftcli.types import Request, SamplingSettings

NOISE_TOKENS = 64
"""Of every row, computed together: a dozen calls for one token cost as much as for all of them."""


class Row:
    """One sample in the making."""

    __slots__ = ("greedy", "ids", "key", "logprobs", "prefix", "request", "sample")

    def __init__(self, request: Request, sample: int, settings: SamplingSettings) -> None:
        earlier = request.partial.get(sample)
        self.request, self.sample = request, sample
        self.ids: list[int] = [] if earlier is None else list(earlier.ids)
        self.logprobs: list[float] | None = None
        if settings.logprobs and (earlier is None or earlier.logprobs is not None):
            self.logprobs = [] if earlier is None else list(earlier.logprobs)
        self.prefix = (*request.prompt.token_ids, *self.ids)
        self.greedy = is_greedy(sample, settings)
        self.key = RowNoise(settings.seed, request.prompt.draw, sample).key


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """P prompts of one width, computed in passes of equally many rows. P may be more than were asked for: dummies come last."""

    caches: list[DynamicCache]
    scores: Tensor
    """(P, V) for the first token"""
    mask: Tensor
    """(P, width) int64"""


class Batch:
    """The rows of a batch and where they stand: R places, some of them with a row."""

    __slots__ = ("_noise", "_noise_at", "cache", "greedy", "keys", "live", "mask", "positions", "rows", "scores", "shaping")

    def __init__(self, size: int, device: torch.device, cache: DynamicCache, scores: Tensor, mask: Tensor, shaping: Shaping | None) -> None:
        self.rows: list[Row | None] = [None] * size
        """(R,) None once finished, and for dummies."""
        self.cache = cache
        self.scores = scores
        """(R, V) for the next token"""
        self.mask = mask
        """(R, positions) int64"""
        self.positions = mask.sum(-1, keepdim=True) - 1
        """(R, 1) of the newest token; stands still for finished rows, so that it stays inside learned position tables"""
        self.live = torch.zeros(size, 1, dtype=torch.int64, device=device)
        """(R, 1) 1 for rows that go on"""
        self.greedy = [False] * size
        """(R,) a dummy is greedy where all rows are"""
        self.keys = np.zeros(size, dtype=np.uint64)
        self.shaping = shaping
        self._noise: np.ndarray | None = None
        self._noise_at = 0

    def place(self, index: int, row: Row) -> None:
        self.rows[index] = row
        self.live[index] = 1
        self.greedy[index] = row.greedy
        self.keys[index] = row.key
        self._noise = None
        if self.shaping is not None:
            self.shaping.place(index, row.request.prompt.token_ids, row.ids)

    def release(self, index: int) -> None:
        self.rows[index] = None
        self.live[index] = 0
        if self.shaping is not None:
            self.shaping.release(index)

    def keep(self, places: list[int]) -> Tensor:
        """Only these places from now on, in their order; as an index (R,)."""
        index = torch.tensor(places, device=self.live.device)
        self.rows = [self.rows[place] for place in places]
        self.greedy = [self.greedy[place] for place in places]
        self.keys, self._noise = self.keys[places], None
        self.scores, self.mask, self.positions, self.live = (part[index] for part in (self.scores, self.mask, self.positions, self.live))
        keep_rows(self.cache, index)
        if self.shaping is not None:
            self.shaping.keep(places)
        return index

    def token_counts(self) -> np.ndarray:
        """(R,) tokens sampled so far."""
        return np.array([0 if row is None else len(row.ids) for row in self.rows], dtype=np.int64)

    def noise(self) -> np.ndarray:
        """(R,) float64 in [0, 1): the uniform number of every row's next token. Rows go on together, so the next ones' are computed with it."""
        if self._noise is None or self._noise_at == NOISE_TOKENS:
            self._noise = uniforms(self.keys, self.token_counts() + np.arange(NOISE_TOKENS)[:, None])
            self._noise_at = 0
        return self._noise[self._noise_at]

    def advance(self) -> None:
        """Make room for one more token in every row."""
        self._noise_at += 1
        self.mask = torch.cat([self.mask, torch.ones_like(self.positions)], dim=-1)
        self.positions = self.positions + self.live


class Pool(Batch):
    """A batch whose places are refilled: every row has a part of the cache of its own, and its own next position in it."""

    __slots__ = ("at", "width")

    def __init__(self, size: int, width: int, positions: int, device: torch.device, first: Prefilled, shaping: Shaping | None) -> None:
        mask = torch.zeros(size, positions, dtype=torch.int64, device=device)
        mask[:, 0] = 1  # a row without anything to see would have no softmax
        scores = first.scores.new_zeros(size, first.scores.shape[-1])
        super().__init__(size, device, slots_like(first.caches[0], size, positions), scores, mask, shaping)
        self.width = width
        self.at = torch.zeros(size, dtype=torch.int64, device=device)

    def fill(self, index: int, row: Row, prompts: Prefilled, which: int) -> None:
        """Put a row with its prompt, number `which` of `prompts`, at a place."""
        number, place = divmod(which, prompts.caches[0].layers[0].keys.shape[0])
        for slot, layer in zip(self.cache.layers, prompts.caches[number].layers, strict=True):
            slot.put(index, layer.keys[place], layer.values[place])
        self.scores[index] = prompts.scores[which]
        self.mask[index] = 0
        self.mask[index, : self.width] = prompts.mask[which]
        self.positions[index] = prompts.mask[which].sum() - 1
        self.at[index] = self.width - 1  # before the first `advance`
        self.place(index, row)

    def keep(self, places: list[int]) -> Tensor:
        index = super().keep(places)
        self.at = self.at[index]
        return index

    def advance(self) -> None:
        self._noise_at += 1
        self.at = self.at + self.live[:, 0]
        self.mask.scatter_(1, self.at[:, None], 1)
        self.positions = self.positions + self.live
        for slot in self.cache.layers:
            assert isinstance(slot, SlotLayer)
            slot.at = self.at
