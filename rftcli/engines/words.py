"""Words of a recipe as token ids of a tokenizer: `logit_bias` and `bad_words`. No torch.

What it leaves out: ids that are given as numbers elsewhere (`stop_token_ids`, `suppress_tokens`), and what is done with the ids (`shaping`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rftcli.errors import UsageError


def bias_ids(logit_bias: Mapping[str, float], tokenizer: Any) -> dict[int, float]:
    """Token id -> bias. UsageError for a text that is not one token, for an id that the tokenizer does not have, and for a token named twice."""
    found: dict[int, float] = {}
    for key, bias in logit_bias.items():
        token = int(key) if key.isdecimal() else _one_token(key, tokenizer)
        if token >= len(tokenizer):
            raise UsageError(f"rollout.logit_bias: there is no token {token}", hint=f"the tokenizer has the ids 0 to {len(tokenizer) - 1}")
        if token in found:
            raise UsageError(f"rollout.logit_bias: `{key}` is token {token}, which has a bias already")
        found[token] = bias
    return found


def _one_token(text: str, tokenizer: Any) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or _decoded(ids, tokenizer) != text:
        raise UsageError(
            f"rollout.logit_bias: `{text}` is not one token but {len(ids)}: {ids}" if len(ids) != 1 else f"rollout.logit_bias: no token is `{text}`",
            hint="name its tokens by id, or ban a word as a whole with `rollout.bad_words`",
        )
    return ids[0]


def banned_sequences(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell the words, alone and after a space: most tokenizers write a word in the middle of a text with other tokens.

    A word that comes about from still other tokens (other pieces, another case) is another sequence and not banned. UsageError for a word that the
    tokenizer cannot spell.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        spellings = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word.lstrip(" "))]
        spellings = [ids for ids in spellings if ids and word.strip() in _decoded(ids, tokenizer)]
        spellings = [ids for ids in spellings if _decoded(ids, tokenizer).strip() == word.strip()]
        if not spellings:
            raise UsageError(f"rollout.bad_words: the tokenizer has no tokens for `{word}`", hint="leave it out: it cannot be sampled either")
        if len(spellings) == 2 and spellings[1][-len(spellings[0]) :] == spellings[0]:
            spellings.pop()  # the space is a token of its own: the first sequence bans the second
        found += spellings
    return tuple(dict.fromkeys(found))


def _decoded(ids: Sequence[int], tokenizer: Any) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
