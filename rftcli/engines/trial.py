"""What the hf engine finds out about its passes before the first rollout, with the model itself: whether the own decode step gives the scores of the
library's forward, and whether a row's bits are the same in passes of any number of rows. Leaves out what follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rftcli.engines.decoder import Decoder, attended
from rftcli.engines.kvcache import expanded
from rftcli.engines.passes import Passes
from rftcli.engines.rows import Batch

VECTOR_ROWS = 8
"""Elementwise kernels treat the last few numbers of an oddly sized tensor separately, with other last bits."""
TRIAL_PROMPTS = 3
TRIAL_ROWS = 256
"""Of the trial that shows whether rows are alike: prompts, and at most so many rows that continue them."""
TRIAL_TOKENS = 2
"""Steps of the trial that compares scores."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.001}
"""Largest accepted difference of two scores, as a share of the largest score: rounding alone. The library's norms are in float32 at most."""


DROPPED_TOKENS = 16
"""Padding is left out by so many positions: sums of a vector's width keep their order."""
LEAST_POSITIONS, MOST_POSITIONS = 32, 256
"""Where padding may be left out: below, sums have another order; above, the trial would take long, and padding is a small part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What trials have found."""

    rows_alike: bool
    """A row's bits are the same in passes of any number of rows."""
    plain: str | None
    """Why tokens go through the library's forward; None: through the own step."""
    padding_drops: bool
    """The own step gives a row the same bits without padding that all rows of its batch share."""


def in_eights(rows: int) -> int:
    return -(-rows // VECTOR_ROWS) * VECTOR_ROWS


def same_scores(own: Passes, plain: Passes, *, width: int, words: int, device: torch.device) -> str | None:
    """None where rows that continue prompts get the same scores both ways, else by how much they differ."""
    lengths = (1, max(1, width // 2), max(1, width - 1))
    prefixes = [tuple((number * 11 + place * 5 + 1) % words for place in range(length)) for number, length in enumerate(lengths)]
    first, second = (_scores(passes, prefixes, width, words, device) for passes in (own, plain))
    difference = float((first.double() - second.double()).abs().max() / second.double().abs().max().clamp(min=1e-30))
    allowed = TOLERANCE[second.dtype]
    return None if difference <= allowed else f"its scores differ by {difference:.2g} of the largest one (at most {allowed:g})"


def _scores(passes: Passes, prefixes: Sequence[tuple[int, ...]], width: int, words: int, device: torch.device) -> Tensor:
    """(tokens, R, V)"""
    prompts = passes.prefill(prefixes, width)
    owner = torch.arange(VECTOR_ROWS, device=device) % len(prefixes)
    batch = Batch(VECTOR_ROWS, device, expanded(prompts.caches, owner), prompts.scores[owner], prompts.mask[owner], None)
    batch.live.fill_(1)
    found = []
    for token in range(TRIAL_TOKENS):
        passes.step(batch, (torch.arange(VECTOR_ROWS, device=device) * 7 + token * 3) % words)
        found.append(batch.scores)
    return torch.stack(found)


def rows_are_alike(passes: Passes, *, width: int, most: int, words: int, device: torch.device) -> bool:
    """Do prompts, and rows that continue them, come out with the same bits alone, in eights, and in the largest pass?"""
    prefixes = [tuple((number * 7 + place * 3) % words for place in range(number + 1)) for number in range(TRIAL_PROMPTS)]

    def scores(rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        prompts = passes.prefill(prefixes, width)
        owner = torch.tensor(rows, device=device)
        batch = Batch(len(rows), device, expanded(prompts.caches, owner), prompts.scores[owner], prompts.mask[owner], None)
        passes.step(batch, (owner * 5 + 1) % words)
        return prompts.scores, batch.scores

    owners = [row % TRIAL_PROMPTS for row in range(in_eights(min(most, TRIAL_ROWS)))]
    together, many = scores(owners)
    first, last = (scores(some)[1] for some in (owners[:VECTOR_ROWS], owners[-VECTOR_ROWS:]))
    alone = torch.cat([passes.prefill([prefix], width).scores for prefix in prefixes])
    return torch.equal(alone, together) and torch.equal(first, many[:VECTOR_ROWS]) and torch.equal(last, many[-VECTOR_ROWS:])


def padding_drops(decoder: Decoder) -> bool:
    """Does attention give the same bits with masked positions in front and without them, for every number of positions that a batch may have?"""
    (key_heads, shared), dim, dtype = decoder.shared, decoder.dim, decoder.dtype
    draws = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(key_heads, size, dim, generator=draws).to(dtype) for size in (shared, 2 * MOST_POSITIONS, 2 * MOST_POSITIONS)
    )
    for seen in range(LEAST_POSITIONS, MOST_POSITIONS + 1):
        dropped = DROPPED_TOKENS * (1 + seen % 7)
        unseen = torch.zeros(key_heads, shared, dropped + seen, dtype=dtype)
        unseen[..., :dropped] = -torch.inf
        padded = attended(queries, keys[:, : dropped + seen], values[:, : dropped + seen], unseen, dim**-0.5)
        bare = attended(
            queries, keys[:, dropped : dropped + seen].clone(), values[:, dropped : dropped + seen].clone(), unseen[..., dropped:].clone(), dim**-0.5
        )
        if not torch.equal(padded, bare):
            return False
    return True
