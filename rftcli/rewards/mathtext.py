r"""Reading answers out of text: where the answer is, what it is without decoration, and which number it stands for. Text in, text and exact
numbers out; the same functions read the gold and the prediction, so no rule can apply to one side only.

Leaves out algebra (x+1 against 1+x), which needs math-verify, and anything longer than MAX_READABLE characters, which is compared as text.

Where: `find_answer` takes, in this order, the last balanced `\boxed{..}`; what follows the last `####` on its line, unless that is a heading;
the last number in the text. Nothing is cut off first: whatever follows the answer, and however long a box is, it is found.

Without decoration (`clean`): math delimiters, `\left`, spacing commands, bold marks, a final full stop, a leading `x =`, the wrapper of
`\text{..}`, and the brackets of a single choice letter go away; `\dfrac` is `\frac`; every kind of dash is a minus; `1,000` is 1000.
- Percent: the sign or word is dropped like a unit. 35% equals 35 and never 0.35.
- Units and currency are dropped, not compared and not converted: 45^\circ, 45 degrees and 45 cm equal 45; 5 km is not 5000 m.

Numbers (`as_number`): integers, decimals, powers of ten, fractions, mixed numbers, roots of perfect squares, nested and with a sign. They are
compared exactly, except that a decimal of six or more places equals what lies within 1e-6 of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction

READ = ("boxed", "hashes", "number")
"""The places an answer is looked for, in this order."""
MAX_READABLE = 300
"""Characters of an answer up to which units are looked for and numbers are read."""
MAX_DIGITS = 1000
"""A longer number is text: reading it would take the time the model's nonsense does not deserve."""
MAX_DEPTH = 12
"""Of nested fractions, roots and brackets."""
DECIMAL_PLACES, DECIMAL_TOLERANCE = 6, Fraction(1, 10**6)

_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"))
_DIGITS = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\,|\\!)[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
_POWER = r"\s*(?:\\times|\\cdot|\*|×|x)\s*10\s*\^\s*(?:[-+]?[0-9]+|\{\s*[-+]?[0-9]+\s*\})|[eE][-+]?[0-9]+(?![0-9A-Za-z])"
_FRACTION = rf"\\[dtc]?frac\s*\{{\s*-?(?:{_DIGITS})\s*\}}\s*\{{\s*(?:{_DIGITS})\s*\}}"
# A minus belongs to the number unless something it could be subtracted from, or a word, touches it: 2-18 and page-18 hold 18.
_SIGN = r"(?:(?<![0-9A-Za-z)\]}.%])-)?"
_IN_TEXT = re.compile(
    rf"{_SIGN}(?:\\?[$€£]\s?)?(?:(?<=[$€£])-)?(?<![0-9A-Za-z_])(?:(?:[0-9]+\s?)?{_FRACTION}|[0-9]+\s[0-9]+/[0-9]+|(?:{_DIGITS})(?:{_POWER}|/(?:{_DIGITS}))?)"
)
# Behind a number: it is a piece of a larger LaTeX expression, unless a unit, a space, a percent sign or the end of the formula comes.
_GOES_ON = re.compile(r"\s*(?:_|\^(?!\s*\{?\s*\\circ)|\\(?!%|\$|[,;:! )\]]|text|mathrm|quad|qquad|circ|degree|n\b))")
_BRACES = re.compile(r"\\+(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_HEADING = re.compile(r"(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*", re.IGNORECASE)
_WORD_FIRST = re.compile(r"[^A-Za-z0-9\\$+(\[{.-]*[A-Za-z]{2,}")


def find_answer(text: str, read: Collection[str] = READ) -> str | None:
    r"""The answer as it stands in `text`, or None if there is none in the places named by `read`.

    >>> find_answer(r"so \boxed{\frac{3}{8}}."), find_answer("17+9=26\n#### 26\nDone."), find_answer("from 20 to 2 is -18.")
    ('\\frac{3}{8}', '26', '-18')
    """
    answer = last_box(text) if "boxed" in read else None
    if answer is None and "hashes" in read:
        answer = _after_hashes(text)
    if answer is None and "number" in read:
        answer = last_number(text)
    return answer


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{..}` (or `\fbox{..}`) whose braces are balanced; of nested ones the inner. One pass, whatever the text."""
    stack: list[int] = []  # for every open brace: where a box's content starts, or -1
    best: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        word = token.group()
        if word == "{":
            stack.append(-1)
        elif word == "}":
            start = stack.pop() if stack else -1
            if start >= 0 and (best is None or start > best[0]):
                best = (start, token.start())
        elif word.endswith("{") and len(word) > 2:  # of two characters is `\{`, a brace that is text
            stack.append(token.end())
    return None if best is None else text[slice(*best)].strip()


def last_number(text: str) -> str | None:
    r"""The last number of running text, with its sign: a decimal, `3/8`, `\frac{3}{8}` or a power of ten.

    None if there is none, or if it is a piece of a larger LaTeX expression (the 2 of `5\sqrt{2}`): a wrong reading is worse than no reading.
    """
    text = text.translate(_DASHES)
    match = None
    for match in _IN_TEXT.finditer(text):
        pass
    if match is None or text[: match.start()].endswith(("{", "^", "_")) or _GOES_ON.match(text, match.end()):
        return None
    return match.group()


def _after_hashes(text: str) -> str | None:
    """What follows the last `####` on its line and is no heading (a heading starts with a word that is not "answer")."""
    end = len(text)
    while (start := text.rfind("####", 0, end)) >= 0:
        tail = text[start + 4 :].split("\n", 1)[0].strip().lstrip("#").strip()
        tail = _HEADING.sub("", tail, count=1) if _HEADING.match(tail) else tail
        if tail and not _WORD_FIRST.match(tail):
            return tail
        end = start
    return None
