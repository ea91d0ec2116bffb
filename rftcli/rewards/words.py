"""Rules over the words of an answer: f1 (SQuAD) and repetition (n-grams). And what a word is, for all rules that count words.

A word is a run of letters, digits, marks and inner apostrophes or hyphens; a character of a script without spaces (Chinese, Japanese, Thai, ...)
is a word of its own.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

import regex

from rftcli.rewards.inputs import RuleInput, cut_after, references

_NO_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_LETTER = rf"[[\p{{L}}\p{{N}}\p{{M}}_]--[{_NO_SPACES}]]"
_WORD = regex.compile(rf"[{_NO_SPACES}]\p{{M}}*|{_LETTER}+(?:['’-]{_LETTER}+)*", regex.V1)
_ARTICLES = frozenset({"a", "an", "the"})


def words(text: str) -> list[str]:
    """The words of `text`, as they stand.

    >>> words("It's well-known: 3 apples, 你好!")
    ["It's", 'well-known', '3', 'apples', '你', '好']
    """
    return _WORD.findall(text)


def f1(item: RuleInput, *, after: str | None = None, articles: bool = False) -> float:
    """The best F1 of the answer's words with those of a reference, as in SQuAD: case, punctuation and (unless `articles`) a, an, the do not count.
    Two texts without words are equal. ValueError without a reference."""
    golds = [_bag(gold, articles) for gold in references(item.reference)]
    text = cut_after(item.text, after)
    if text is None:
        return 0.0
    answer = _bag(text, articles)
    return max(_overlap(answer, gold) for gold in golds)


def _bag(text: str, articles: bool) -> Counter[str]:
    found = words(unicodedata.normalize("NFKC", text).casefold())
    return Counter(word for word in found if articles or word not in _ARTICLES)


def _overlap(answer: Counter[str], gold: Counter[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    shared = (answer & gold).total()
    return 2 * shared / (answer.total() + gold.total())


def repetition(item: RuleInput, *, n: int = 3, penalty: float = -1.0) -> float:
    """`penalty` times the share of n-grams of words that were there before (arXiv:2502.03373): 0 without a repetition and for fewer than n words.

    "a b a b a b", n 2: five pairs, two different ones: 3/5 of the penalty.
    """
    found = [word.casefold() for word in words(item.text)]
    grams = [tuple(found[start : start + n]) for start in range(len(found) - n + 1)]
    return penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0


def check_repetition(options: Mapping[str, Any]) -> list[str]:
    problems = [] if options["n"] >= 1 else [f"option `n` must be at least 1, got {options['n']}"]
    return problems + ([] if options["penalty"] <= 0 else [f"option `penalty` must be at most 0, got {options['penalty']}"])
