"""Passes of the hf engine: prompts through the model to a cache, and one more token of every row.

Prompts go through transformers' own forward; a token goes through `decoder` where that is covered and proved, else through the forward too. Both use
the products of `linears`. What it leaves out: which rows make a pass, and which token they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from rftcli.engines.decoder import Decoder
from rftcli.engines.linears import Products
from rftcli.engines.rows import Batch, Prefilled

PREFILL_TOKENS = 2048
"""Positions of a pass over prompts that may be any number: enough to fill a CPU, and little memory."""


def prompts_of(width: int) -> int:
    """Prompts of a pass, where it may be any number."""
    return max(1, PREFILL_TOKENS // width)


@cache
def _last_only(kind: type[nn.Module]) -> dict[str, Any]:
    """Scores of the last position alone, where the model can be asked for them."""
    return {"logits_to_keep": 1} if "logits_to_keep" in signature(kind.forward).parameters else {}


class Passes:
    """With the weights of one moment. `decoder`: None where the library's forward takes the tokens. `prompts_at_once`: of every pass over prompts;
    None: as many as fit. `pad_id` fills masked positions."""

    def __init__(
        self, module: Any, products: Products, decoder: Decoder | None, *, prompts_at_once: int | None, pad_id: int, device: torch.device
    ) -> None:
        self._module, self._products, self.decoder = module, products, decoder
        self.prompts_at_once, self._pad_id, self._device = prompts_at_once, pad_id, device
        self._last_only = _last_only(type(module))

    @torch.no_grad()
    def prefill(self, prefixes: Sequence[tuple[int, ...]], width: int) -> Prefilled:
        """The prompts in order, padded on the left to `width`, in passes of as many as fit or of a fixed number; dummies repeat the first."""
        fixed = self.prompts_at_once
        missing = 0 if fixed is None else -len(prefixes) % fixed
        size = prompts_of(width) if fixed is None else fixed
        padded = torch.full((len(prefixes) + missing, width), self._pad_id)
        mask = torch.zeros_like(padded)
        for index, prefix in enumerate([*prefixes, *(prefixes[0] for _ in range(missing))]):
            padded[index, width - len(prefix) :] = torch.tensor(prefix)
            mask[index, width - len(prefix) :] = 1
        padded, mask = padded.to(self._device), mask.to(self._device)
        caches, scores = [], []
        for ids, seen in zip(padded.split(size), mask.split(size), strict=True):
            cache = DynamicCache(config=self._module.config)
            scores.append(self._forward(ids, seen, (seen.cumsum(-1) - 1).clamp(min=0), cache))
            caches.append(cache)
        return Prefilled(caches=caches, scores=torch.cat(scores), mask=mask)

    @torch.no_grad()
    def step(self, batch: Batch, ids: Tensor) -> None:
        """Feed the chosen ids (R,), those below 0 as dummies, and take the scores that follow."""
        batch.advance()
        ids = ids.clamp(min=0)
        if self.decoder is not None:
            batch.scores = self.decoder(ids, batch)
        else:
            batch.scores = self._forward(ids[:, None], batch.mask, batch.positions, batch.cache)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """(B, V) of the last position; the cache grows."""
        with self._products.applied():
            output = self._module(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, **self._last_only
            )
        return output.logits[:, -1]
