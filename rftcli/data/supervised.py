"""Rows that carry their answer as token ids, for supervised learning: prompt + answer.

The prompt's ids are those that the engine would get (`prompts`), the answer's end with the end token. What is left out: the order of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rftcli.data.prompts import PromptBuilder
from rftcli.data.rows import Row
from rftcli.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One row as it is learned.

    >>> Answered(token_ids=(5, 9, 11, 2), prompt_tokens=2, cut=False).prompt_tokens
    2
    """

    token_ids: tuple[int, ...]
    """Prompt, then answer."""
    prompt_tokens: int
    cut: bool
    """The answer was longer than allowed; the rest of it, with its end token, is gone."""


def encode_answers(
    rows: Sequence[Row], builder: PromptBuilder, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], max_answer_tokens: int
) -> list[Answered]:
    """Every row with its answer as ids. UsageError, with the row's place, for an answer that is no text or has no tokens."""
    found = []
    for row in rows:
        prompt = builder.build(row, 0).token_ids
        answer = _answer_ids(row, builder, tokenizer, end_ids)
        found.append(
            Answered(token_ids=prompt + answer[:max_answer_tokens], prompt_tokens=len(prompt), cut=len(answer) > max_answer_tokens)
        )
    return found


def _answer_ids(row: Row, builder: PromptBuilder, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> tuple[int, ...]:
    """Up to and with the last end token that the chat template writes; behind plain text the tokenizer's own end token."""
    where = f"data set `{row.source}`: {row.place}"
    if not isinstance(row.reference, str) or not row.reference:
        raise UsageError(f"{where}: the answer must be text", hint="`train.supervised.data.columns: {reference: ...}` names its column")
    text = builder.answer_text(row, row.reference)
    ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if not ids:
        raise UsageError(f"{where}: the answer has no tokens", hint="the tokenizer knows none of its text")
    ends = [place for place, token in enumerate(ids) if token in end_ids]
    if ends:
        return ids[: ends[-1] + 1]
    return ids if tokenizer.eos_token_id is None else (*ids, tokenizer.eos_token_id)
