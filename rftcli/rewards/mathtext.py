r"""What an answer says: the answer without its decoration, and the number it stands for. Gold and prediction go through the same functions, so no
rule can apply to one side only. Text in, text and exact numbers out.

Leaves out finding the answer (`find_answer`) and algebra, x+1 against 1+x, which is math-verify's (`math_worker`).

Decoration (`clean`): math delimiters, `\left`, spacing commands, bold marks, a final full stop, a leading `x =`, the wrapper of `\text{..}`, the
brackets of a single choice letter. `\dfrac` is `\frac`; hyphens and minus signs are one; `1,000` is 1000 unless it stands in brackets.
- Percent: the sign or word is dropped like a unit. 35% equals 35, and neither equals 0.35.
- Units and currency are dropped, never compared or converted: 45^\circ, 45 degrees and 45 cm equal 45; 5 km is 5 and not 5000 m. So a lone
  `5 m` or `5m` is 5, also where m was meant as a variable.

Numbers (`as_number`): integers, also in a base that is written (`1010_2` is 10), decimals, powers of ten, fractions, mixed numbers, roots of perfect
squares, nested and with a sign. They are compared exactly, except that a decimal of six or more places equals whatever lies within 1e-6 of it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from rftcli.rewards.find_answer import DASHES, DIGITS, POWER_OF_TEN

MAX_READABLE = 300
"""Characters of an answer up to which units are looked for and numbers are read; a longer answer is compared as text."""
MAX_EXPONENT = 300
MAX_DEPTH = 12
"""Of nested fractions, roots and brackets."""
DECIMAL_PLACES, DECIMAL_TOLERANCE = 6, Fraction(1, 10**6)

_WRAPPERS = r"\\(?:text|mathrm|textrm|mbox|mathbf|textbf|textit|mathit|operatorname|rm)"
_EXPONENT = r"(?: ?\^ ?\{?-?[0-9]\}?|[²³])?"
_SUBSTITUTIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:left|right|displaystyle|bigg?|Bigg?)(?![A-Za-z])", ""),
        (r"(?<=[0-9])(?:\{,\}|\\,|\\!)(?=[0-9]{3}(?![0-9]))", ","),
        (r"\\!|\\[$€£]|[$€£]", ""),
        (r"\\[,;: ]|\\q?quad(?![A-Za-z])|~|\u00a0|\u202f", " "),
        (r"(?<!\\)\\[()\[\]]", ""),
        (r"\^ ?\{? ?\\circ ?\}?|\\degree(?![A-Za-z])|°|\\?%", ""),
        (r"\binfinity\b", r"\\infty"),
        (r"\s+", " "),
    )
)
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_ASSIGNMENT = re.compile(r"[A-Za-z](?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]+\}))? ?= ?([^=]+)")
_WRAPPED = re.compile(_WRAPPERS + r" ?\{([^{}]*)\}")
_CHOICE = re.compile(r"[(\[]?([A-Za-z])[)\].]")

_UNIT = (
    "[cdkmnµ]?m|[cdm]?[lL]|[km]?g|s|h|ft|yd|mi|in|lbs?|oz|min|sec|hrs?|mph|km/?h|rad|deg|mol|k?Hz|k?W|k?J|am|pm|st|nd|rd|th"
    "|percent|degrees?|radians?|inch(?:es)?|feet|foot|yards?|miles?|met(?:er|re)s?|lit(?:er|re)s?|seconds?|minutes?|hours?|days?|weeks?|months?|years?"
    "|dollars?|cents?|(?:square |cubic )?units?"
)
_TEXT_UNIT = re.compile(rf"{_WRAPPERS} ?\{{([^{{}}]*)\}}{_EXPONENT}$")
_KNOWN_UNIT = re.compile(rf"(?<=[ }}0-9])(?:{_UNIT}){_EXPONENT}(?: ?/ ?(?:{_UNIT}){_EXPONENT})?$")
_WORDS_AFTER_NUMBER = re.compile(rf"(-?(?:{DIGITS})(?:/[0-9]+)?) ((?:[A-Za-zµ]+\.?{_EXPONENT})(?:(?: ?/ ?|[ ·*-])(?:[A-Za-zµ]+\.?{_EXPONENT}))*)")
_NOT_UNITS = frozenset(
    {"inf", "infinity", "sqrt", "sin", "cos", "tan", "log", "exp", "mod", "tau", "pi", "or", "and", "if", "to"}
    | {"dozen", "half", "hundred", "thousand", "million", "billion", "trillion"}
)
"""Words behind a number that change it: with one of these there is no unit to drop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One side of a comparison, read."""

    text: str
    """Without decoration."""
    number: Fraction | None
    decimals: int
    """Places behind the point of a plain decimal; 0 for everything else, which is exact."""


def read(raw: str) -> Answer:
    r"""The answer that `raw` is.

    >>> read(r"x = 1{,}000 \text{ cm}").number, read(r"\frac{3}{8}").number, read("Monday.").text
    (Fraction(1000, 1), Fraction(3, 8), 'Monday')
    """
    text = clean(raw)
    number = as_number(text)
    plain = re.fullmatch(r"-?[0-9]*\.([0-9]+)", text) if number is not None else None
    return Answer(text=text, number=number, decimals=len(plain[1]) if plain else 0)


def same(gold: Answer, answer: Answer) -> bool | None:
    """Whether two answers are equal, by text and by number; None: that is a question for algebra. Symmetric."""
    if not gold.text or not answer.text:
        return False
    if text_key(gold.text) == text_key(answer.text):
        return True
    if gold.number is not None and answer.number is not None:
        about = max(gold.decimals, answer.decimals) >= DECIMAL_PLACES
        return abs(gold.number - answer.number) <= (DECIMAL_TOLERANCE if about else 0)
    if is_words(gold.text) or is_words(answer.text):
        return False
    return None


def is_words(text: str) -> bool:
    """Prose such as `no solution`: letters only, with a word of four or more. It is compared as text, without regard to case and spaces."""
    return re.fullmatch(r"[A-Za-z][A-Za-z ',-]*", text) is not None and re.search(r"[A-Za-z]{4}", text) is not None


def balanced(text: str) -> bool:
    r"""Whether the braces of `text` close; escaped ones (`\{`) are text."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


def canonical(answer: Answer) -> str:
    """The answer as algebra should read it: a number that is not a plain decimal becomes `a/b`."""
    if answer.number is None or answer.decimals:
        return answer.text
    return str(answer.number)


def text_key(text: str) -> str:
    """Spaces do not matter, except between digits (3 1/2 is not 31/2). Case does not matter in words."""
    text = re.sub(r"(?<![0-9]) | (?![0-9])", "", text)
    return text.casefold() if is_words(text) else text


def clean(raw: str) -> str:
    """`raw` without decoration, as listed at the top. Cleaning twice changes nothing that `as_number` sees."""
    text = raw.translate(DASHES)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    text = _strip_marks(text)
    if wrapped := _WRAPPED.fullmatch(text):
        text = _strip_marks(wrapped[1])
    if assigned := _ASSIGNMENT.fullmatch(text):
        text = assigned[1]
    if choice := _CHOICE.fullmatch(text):
        return choice[1]
    if not text.startswith(("(", "[", "{", "\\{")):
        text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)
    return _strip_marks(_without_units(text)) if len(text) <= MAX_READABLE else text


def _strip_marks(text: str) -> str:
    return text.strip("*` ").rstrip(".,;: ").strip()


def _without_units(text: str) -> str:
    r"""Without `\text{..}` behind a number, a known unit behind a value without letters, and any words of three or more letters behind a number."""
    for _ in range(3):  # `\text{km}/\text{h}` is taken off from the right
        found = _TEXT_UNIT.search(text)
        if found is None or not _has_number(text[: found.start()]) or not _are_units(found[1]):
            break
        text = text[: found.start()].rstrip(" /*")
    if (found := _KNOWN_UNIT.search(text)) and _has_number(text[: found.start()]) and not _has_variable(text[: found.start()]):
        return text[: found.start()].rstrip()
    found = _WORDS_AFTER_NUMBER.fullmatch(text)
    if found and _are_units(found[2]) and all(len(word) > 2 or re.fullmatch(_UNIT, word) for word in re.findall(r"[A-Za-zµ]+", found[2])):
        return found[1]
    return text


def _are_units(words: str) -> bool:
    return _NOT_UNITS.isdisjoint(word.lower() for word in re.findall(r"[A-Za-z]+", words))


def _has_number(text: str) -> bool:
    return re.search(r"[0-9]|\\pi", text) is not None


def _has_variable(text: str) -> bool:
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)) is not None


_PLAIN = re.compile(rf"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)({POWER_OF_TEN})?")  # no commas: (1,234) is a point
_BASE = re.compile(r"([0-9][0-9A-Z]*)_\{? ?([0-9]{1,2}) ?\}?")
_MIXED = re.compile(r"([0-9]+) ?(\\frac.+|(?<= )[0-9]+/[0-9]+)")
_SQRT = re.compile(r"\\sqrt ?\{(.+)\}|\\sqrt ?([0-9])|sqrt ?\((.+)\)|√ ?\(?([0-9]+)\)?")


def as_number(text: str, depth: int = 0) -> Fraction | None:
    r"""The exact number that a cleaned answer stands for, or None.

    >>> as_number(r"\sqrt{\frac{9}{64}}"), as_number("-3 1/2"), as_number("2x")
    (Fraction(3, 8), Fraction(-7, 2), None)
    """
    text = text.strip()
    if not text or len(text) > MAX_READABLE or depth > MAX_DEPTH:
        return None
    if text[0] in "+-":
        number = as_number(text[1:], depth + 1)
        return number if number is None or text[0] == "+" else -number
    if plain := _PLAIN.fullmatch(text):
        return _plain(plain[1], plain[2])
    if based := _BASE.fullmatch(text):
        base = int(based[2])
        return Fraction(int(based[1], base)) if 2 <= base <= 36 and all(int(digit, 36) < base for digit in based[1]) else None
    if text[0] in "{(" and _closing(text, 0) == len(text) - 1:
        return as_number(text[1:-1], depth + 1)
    if mixed := _MIXED.fullmatch(text):
        part = as_number(mixed[2], depth + 1)
        return None if part is None else int(mixed[1]) + part
    if text.startswith(r"\frac"):
        return _latex_fraction(text[5:].strip(), depth)
    if root := _SQRT.fullmatch(text):
        return _root(as_number(next(group for group in root.groups() if group is not None), depth + 1))
    above, slash, below = text.partition("/")
    return _divide(as_number(above, depth + 1), as_number(below, depth + 1)) if slash and "/" not in below else None


def _plain(digits: str, power: str | None) -> Fraction | None:
    number = Fraction(digits)
    if power is None:
        return number
    exponent = int(re.search(r"[-+]?[0-9]+\s*\}?$", power)[0].rstrip("} "))
    return number * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None


def _latex_fraction(text: str, depth: int) -> Fraction | None:
    r"""Of what follows `\frac`: two groups, each in braces or one digit."""
    parts: list[str] = []
    for _ in range(2):
        text = text.lstrip()
        end = _closing(text, 0) if text.startswith("{") else 0
        if not text or end is None:
            return None
        parts.append(text[: end + 1])
        text = text[end + 1 :]
    return None if text else _divide(as_number(parts[0], depth + 1), as_number(parts[1], depth + 1))


def _divide(above: Fraction | None, below: Fraction | None) -> Fraction | None:
    return above / below if above is not None and below else None


def _root(number: Fraction | None) -> Fraction | None:
    if number is None or number < 0:
        return None
    root = Fraction(math.isqrt(number.numerator), math.isqrt(number.denominator))
    return root if root * root == number else None


def _closing(text: str, start: int) -> int | None:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None
