r"""The rule `choice`: which letter an answer chooses, and is it the reference's?

The letter is looked for in this order: the last `\boxed{..}`; the last `<answer>..</answer>`; the last phrase such as "the answer is (B)" or
"Answer: B"; a last line that is a choice ("B", "(B) Paris", "**B.**"). A place that is there and holds no choice ends the search: an answer that
boxes "A or B" has chosen nothing, whatever it says elsewhere. The reference is a letter, written in any of the ways a choice is, or a list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rftcli.rewards.find_answer import last_box
from rftcli.rewards.inputs import RuleInput, cut_after, references

LETTERS = "ABCDEFGHIJ"
NEAR = 16
"""Characters behind a letter in which a second one would make it no choice: "B or C", "B) or (C)"."""
MARKS = " \t*_`$.:;,\"'’()[]{}<>（）【】。：、"
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_PHRASE = re.compile(
    r"(?:(?:answer|choice|option)s?(?:[ \t*_`]+(?:is|are|would be|should be|must be)\b|[ \t*_`]*[:：])[:：]?"
    r"|\b(?:choose|select|pick)\b|答案(?:是|为|选)?[:：]?|选)"
    r"[ \t*_`$(（\[{\"']*(?:\\text(?:bf)?\{)?(?:option |choice )?[*_(\[{]*"
    r"([A-Z](?:[ ,]*(?:and|&)?[ ,]*[A-Z](?![A-Za-z]))*)(?![A-Za-z'’])",
    re.IGNORECASE,
)
_WRAPPER = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_HEAD = re.compile(r"[*_(\[{]*([A-Za-z])[*_]*(?:[)\].:}]|$)")


def choice(item: RuleInput, *, choices: str = LETTERS, several: bool = False, after: str | None = None) -> float:
    """1 if the letter that the answer chooses is the reference, or one of them. `several`: any number of letters may be right, and the set has to be
    the reference's. ValueError for a reference that names no choice."""
    golds = [gold_letters(gold, choices, several) for gold in references(item.reference)]
    text = cut_after(item.text, after)
    chosen = None if text is None else chosen_letters(text, choices, several)
    return float(chosen is not None and chosen in golds)


def gold_letters(gold: str, choices: str, several: bool) -> frozenset[str]:
    """The reference as a set of letters. ValueError if it names none."""
    found = _letters(gold, choices, several)
    if found is None:
        raise ValueError(f"the reference {gold[:80]!r} is no choice of {', '.join(choices)}")
    return found


def chosen_letters(text: str, choices: str, several: bool) -> frozenset[str] | None:
    r"""What an answer chooses; None for nothing that can be told.

    >>> [sorted(chosen_letters(text, "ABCD", False) or "-") for text in (r"\boxed{B}", "The answer is (c).", "A or B")]
    [['B'], ['C'], ['-']]
    """
    box = last_box(text)
    if box is not None:
        return _letters(box, choices, several)
    tags = _TAG.findall(text)
    if tags:
        return _letters(tags[-1], choices, several)
    phrases = [found for found in _PHRASE.finditer(text) if _meant(found[1], text[found.end(1) :])]
    if phrases:
        last = phrases[-1]
        open_question = _another(text[last.end(1) :].partition("\n")[0][:NEAR], choices)
        return None if open_question else _letters(last[1], choices, several)
    lines = [line for line in text.splitlines() if line.strip(MARKS)]
    return _letters(lines[-1], choices, several) if lines else None


def _meant(letters: str, behind: str) -> bool:
    """Is it a choice, and not the article of "the answer is a matter of taste" or the pronoun of "choose I must"?"""
    return not (letters in ("a", "i", "I") and re.match(r"[ \t]+[a-z]", behind))


def _letters(text: str, choices: str, several: bool) -> frozenset[str] | None:
    text = _WRAPPER.sub(r"\1", text).strip()
    bare = text.strip(MARKS)
    if several:
        pieces = [piece for piece in re.split(r"[\s,;/&+]+|\band\b", bare, flags=re.IGNORECASE) if piece.strip(MARKS)]
        if len(pieces) == 1 and pieces[0].isalpha() and pieces[0].isupper():  # AC
            pieces = list(pieces[0])
        found = [piece.strip(MARKS).upper() for piece in pieces]
        if found and all(len(letter) == 1 and letter in choices for letter in found):
            return frozenset(found)
    elif len(bare) == 1 and bare.upper() in choices:
        return frozenset(bare.upper())
    head = _HEAD.match(text)
    if head and head[1].upper() in choices and not _another(text[head.end() :], choices):
        return frozenset(head[1].upper())
    return None


def _another(behind: str, choices: str) -> bool:
    """Does a second choice follow, as in "(A) or (B)"?"""
    return re.search(rf"(?:\b(?:or|and)\b|[/,&])\s*[*_(\[{{]*[{re.escape(choices)}](?![A-Za-z0-9'’])", behind) is not None


def check_choice(options: Mapping[str, Any]) -> list[str]:
    letters = options["choices"]
    good = len(letters) >= 2 and letters.isascii() and letters.isalpha() and letters.isupper() and len(set(letters)) == len(letters)
    return [] if good else [f"option `choices` is two or more different capital letters, such as ABCD, got `{letters}`"]
