r"""Where the answer stands in a text: the last balanced `\boxed{..}`; else what follows the last `####` on its line; else the last number.

Nothing is cut off first: whatever follows the answer, and however long a box is, it is found. All patterns take time linear in the text, since
the text is whatever a model says. Leaves out what the answer means (`mathtext`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection

from rftcli.rewards.rules import READ

DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
"""Hyphens, the en dash and the minus signs, which models use alike. The em dash is punctuation."""
DIGITS = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\,|\\!)[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
POWER_OF_TEN = r"\s*(?:\\times|\\cdot|\*|×|x)\s*10\s*\^\s*(?:[-+]?[0-9]+|\{\s*[-+]?[0-9]+\s*\})|[eE][-+]?[0-9]+(?![0-9A-Za-z])"

_FRACTION = rf"\\[dtc]?frac\s*\{{\s*-?(?:{DIGITS})\s*\}}\s*\{{\s*(?:{DIGITS})\s*\}}"
_NUMBER = re.compile(
    # A minus belongs to the number unless something it could be subtracted from, or a word, touches it: 2-18 and page-18 hold 18.
    r"(?:(?<![0-9A-Za-z)\]}.%])-)?(?:\\?[$€£] ?)?(?:(?<=[$€£])-)?(?<![0-9A-Za-z_])"
    rf"(?:(?:[0-9]+ ?)?{_FRACTION}|[0-9]+ [0-9]+/[0-9]+(?![0-9])|(?:{DIGITS})(?:{POWER_OF_TEN}|/(?:{DIGITS}))?)"
)
# Behind a number, this says that it is a piece of a larger LaTeX expression: no unit, space, percent sign or end of the formula.
_GOES_ON = re.compile(r"[ \t]*(?:_|\^(?!\s*\{?\s*\\circ)|\\(?!%|\$|[,;:! ()\[\]\\]|text|mathrm|quad|qquad|circ|degree))")
_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_COLON = re.compile(r"[*_ ]*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\b[*_ ]*:?[*_ ]*", re.IGNORECASE)
_HEADING = re.compile(r"[^A-Za-z0-9\\$+(\[{.-]*(?!pi\b)[A-Za-z]{2,}\b(?!\()")


def find_answer(text: str, read: Collection[str] = READ) -> str | None:
    r"""The answer as it stands in `text`, or None if there is none in the places named by `read`.

    >>> find_answer(r"so \boxed{\frac{3}{8}}."), find_answer("17+9=26\n#### 26\nDone."), find_answer("from 20 to 2 is -18.")
    ('\\frac{3}{8}', '26', '-18')
    """
    answer = last_box(text) if "boxed" in read else None
    if answer is None and "hashes" in read:
        answer = after_hashes(text)
    if answer is None and "number" in read:
        answer = last_number(text)
    return answer


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{..}` (or `\fbox{..}`) that is balanced and not empty; of nested ones the inner."""
    stack: list[int] = []  # for every open brace: where a box's content starts, or -1
    start, end = -1, -1
    for token in _BRACES.finditer(text):
        word = token.group()
        if word == "{":
            stack.append(-1)
        elif word == "}":
            opened = stack.pop() if stack else -1
            if opened > start and text[opened : token.start()].strip():
                start, end = opened, token.start()
        elif word.endswith("{") and len(word) > 2:  # two characters would be `\{`, a brace that is text
            stack.append(token.end())
    return None if start < 0 else text[start:end].strip()


def after_hashes(text: str) -> str | None:
    """What follows the last `####` on its line. A line that goes on with a word is a heading and passed over, unless the word is "answer"."""
    for line in reversed(text.splitlines()):
        _, hashes, tail = line.rpartition("####")
        tail = _ANSWER_COLON.sub("", tail.strip(), count=1) if hashes else ""
        if tail and not _HEADING.match(tail):
            return tail
    return None


def last_number(text: str) -> str | None:
    r"""The last number of running text, with its sign: a decimal, `3/8`, `\frac{3}{8}` or a power of ten.

    None if there is none, or if it is a piece of a larger LaTeX expression (the 2 of `5\sqrt{2}`): a wrong reading is worse than no reading.
    """
    text = text.translate(DASHES)
    match = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if match is None or text[: match.start()].endswith(("{", "^", "_")) or _GOES_ON.match(text, match.end()):
        return None
    return match.group()
