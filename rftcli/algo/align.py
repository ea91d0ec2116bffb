"""Index arithmetic: which position of which row predicts which trained token, in the padded and in the packed layout.

The log-prob of the token at position i is read at position i - 1, so a token is *selected* by the flat index of the position before it. Both
layouts list the same trained tokens in the same order: by row, then by position.

What it leaves out: models, and deciding which rows share a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """One sequence. `token_ids` (prompt_tokens + T,) int64, `mask` (T,) bool: which sampled tokens are trained on.

    No sampled token (T = 0) and no trained one (mask all False) are both legal: the row is in the inputs and contributes no token.
    """

    token_ids: Tensor
    prompt_tokens: int
    mask: Tensor
    group: int | None = None
    """Rows of one group have one prompt, which `shared` lays out once; None: a row of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Model inputs of a micro-batch and its N trained tokens; the fields of `types.Batch` of the same names. N = 0 is legal."""

    input_ids: Tensor
    """(B, S) int64"""
    position_ids: Tensor
    """(B, S) int64"""
    attention_mask: Tensor | None
    """(B, S) int64, 1 = real token; None in the packed layout."""
    select: Tensor
    """(N,) int64 flat index into B*S of the position that predicts each trained token."""
    target_ids: Tensor
    """(N,) int64"""
    sequence: Tensor
    """(N,) int64, sorted: the row each trained token belongs to."""
    num_sequences: int
    ends: Tensor
    """(num_sequences,) int64 flat index into B*S of each row's last token."""


def padded(rows: Sequence[Row], pad_id: int) -> Inputs:
    """One row per sequence, padded on the right to the longest: B = len(rows), S = longest."""
    _check(rows)
    lengths = torch.tensor([row.token_ids.numel() for row in rows])  # (B,)
    longest = int(lengths.max())
    positions = torch.arange(longest)  # (S,)
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    for index, row in enumerate(rows):
        input_ids[index, : row.token_ids.numel()] = row.token_ids
    return _inputs(
        rows,
        input_ids=input_ids,
        position_ids=positions.repeat(len(rows), 1),
        attention_mask=(positions < lengths[:, None]).long(),
        starts=[index * longest for index in range(len(rows))],
    )


def packed(rows: Sequence[Row]) -> Inputs:
    """All sequences one after another in one row: B = 1, S = sum of lengths; positions restart at 0 at each of them."""
    _check(rows)
    lengths = [row.token_ids.numel() for row in rows]
    return _inputs(
        rows,
        input_ids=torch.cat([row.token_ids for row in rows])[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        attention_mask=None,
        starts=list(accumulate(lengths[:-1], initial=0)),
    )


def shared(rows: Sequence[Row]) -> Inputs:
    """`packed`, but rows of one group that follow each other have their prompt once, in front of their completions; the positions of each completion
    go on from the prompt's length. All of them predict their first token at the prompt's last place."""
    _check(rows)
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    starts: list[tuple[int, int]] = []  # places of the prompt's last token and of the completion's first
    total = 0
    for index, row in enumerate(rows):
        if not index or not same_prompt(rows[index - 1], row):
            ids.append(row.token_ids[: row.prompt_tokens])
            positions.append(torch.arange(row.prompt_tokens))
            total += row.prompt_tokens
            last = total - 1
        starts.append((last, total))
        ids.append(row.token_ids[row.prompt_tokens :])
        positions.append(torch.arange(row.prompt_tokens, row.token_ids.numel()))
        total += row.mask.numel()
    trained = [row.mask.nonzero().flatten() for row in rows]
    select = [torch.where(tokens == 0, last, start + tokens - 1) for (last, start), tokens in zip(starts, trained, strict=True)]
    ends = [start + row.mask.numel() - 1 if row.mask.numel() else last for (last, start), row in zip(starts, rows, strict=True)]
    return Inputs(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        attention_mask=None,
        select=torch.cat(select),
        target_ids=torch.cat([row.token_ids[row.prompt_tokens :][row.mask] for row in rows]),
        sequence=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([tokens.numel() for tokens in trained])),
        num_sequences=len(rows),
        ends=torch.tensor(ends),
    )


def same_prompt(one: Row, other: Row) -> bool:
    """Whether two rows are completions of one group's prompt. Ids alone do not say it: what is not text may stand behind them."""
    if one.group is None or one.group != other.group or one.prompt_tokens != other.prompt_tokens:
        return False
    return torch.equal(one.token_ids[: one.prompt_tokens], other.token_ids[: other.prompt_tokens])


def flatten(vectors: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """(N,) the entries of the vectors (T,) at trained tokens, row after row: in the order of `Inputs.select`."""
    return torch.cat([vector[mask] for vector, mask in zip(vectors, masks, strict=True)])


def unflatten(values: Tensor, masks: Sequence[Tensor]) -> list[Tensor]:
    """The way back from (N,): one vector (T,) a row, 0 where a token is not trained on."""
    counts = [int(mask.sum()) for mask in masks]
    assert values.numel() == sum(counts), f"{values.numel()} values for {sum(counts)} trained tokens"
    vectors = []
    for part, mask in zip(values.split(counts), masks, strict=True):
        vector = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
        vector[mask] = part
        vectors.append(vector)
    return vectors


def _check(rows: Sequence[Row]) -> None:
    assert rows, "a micro-batch without rows"
    for row in rows:
        assert row.prompt_tokens >= 1, "an empty prompt leaves no position that predicts the first token"
        assert row.mask.dtype == torch.bool, row.mask.dtype
        assert row.token_ids.numel() == row.prompt_tokens + row.mask.numel(), (row.token_ids.numel(), row.prompt_tokens, row.mask.numel())


def _inputs(
    rows: Sequence[Row], *, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, starts: Sequence[int]
) -> Inputs:
    """Inputs with the selection; `starts` is the flat index of each row's first token."""
    trained = [row.mask.nonzero().flatten() for row in rows]  # per row: 0..T-1 of the trained tokens
    shifted = [start + row.prompt_tokens - 1 + tokens for start, row, tokens in zip(starts, rows, trained, strict=True)]
    select = torch.cat(shifted)
    return Inputs(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        select=select,
        target_ids=input_ids.flatten()[select + 1],
        sequence=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([tokens.numel() for tokens in trained])),
        num_sequences=len(rows),
        ends=torch.tensor([start + row.token_ids.numel() - 1 for start, row in zip(starts, rows, strict=True)]),
    )
