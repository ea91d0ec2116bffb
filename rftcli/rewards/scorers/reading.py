"""A judge's reply to a number. What cannot be read is an error with the reply in it, never a number.

Leaves out asking (`judge`, `runtime.scorers`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import regex

from rftcli.rewards.scorers.spec import ReadSpec

LONGEST_REPLY = 100_000
"""Characters; only the end of a longer one is looked at."""
PATTERN_SECONDS = 2.0
SHOWN = 160
GOES_ON = ("0", ".5")
"""How a reply that was cut could have gone on: a score that one of these would change was not said to its end."""
UNSEEN_SHARE = 0.01
"""A word that a server does not list counts as 0 where what it lists last is below this share of what was found."""


def read_reply(read: ReadSpec, reply: str, *, cut: bool = False) -> float:
    """ValueError, with the reply, where there is no number. `cut`: the reply ended at its longest, so its last number may be a piece of one."""
    text = reply[-LONGEST_REPLY:]
    if read.regex is None:
        return finite(_by_field(str(read.json), text, cut), reply) * read.scale
    value = _by_pattern(read.regex, text)
    if cut and any(_by_pattern(read.regex, text + more) != value for more in GOES_ON):
        raise _cut(text)
    return finite(value, reply) * read.scale


def _cut(text: str) -> ValueError:
    return ValueError(f"the judge's reply was cut at `max_new_tokens` before its score was whole: it replied {shown(text)}")


def finite(value: Any, reply: str) -> float:
    """A number, or a text that is one."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the judge's score {value!r} is no finite number; it replied {shown(reply)}")
    return number


def _by_pattern(pattern: str, text: str) -> str:
    try:
        found = [match[1] for match in regex.finditer(pattern, text, timeout=PATTERN_SECONDS)]
    except TimeoutError:
        raise ValueError(f"the pattern takes more than {PATTERN_SECONDS:g} seconds on {shown(text)}") from None
    if not found or found[-1] is None:
        raise ValueError(f"the judge's reply has no score (`{pattern}`): it replied {shown(text)}")
    return found[-1].strip()


def _by_field(path: str, text: str, cut: bool) -> Any:
    """The field of the last JSON object of the text that has it."""
    decoder, at, found = json.JSONDecoder(), 0, []
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            if cut:  # what it would have said counts, and not what it said before
                raise _cut(text) from None
            at += 1
            continue
        found.append(value)
        at = end
    for value in reversed(found):
        for name in path.split("."):
            value = value[name] if isinstance(value, Mapping) and name in value else _MISSING
        if value is not _MISSING:
            return value
    raise ValueError(f"the judge's reply has no JSON object with `{path}`: it replied {shown(text)}")


_MISSING = object()


def share(read: ReadSpec, probabilities: Mapping[str, float], *, complete: bool) -> float:
    """The probability of the `token`, among all words or against its alternatives. `probabilities` are those of single tokens as text; spaces around
    a word do not matter. Not `complete`: only the likeliest tokens are there. ValueError where that is too little to tell."""
    words = (str(read.token), *read.against)
    found = dict.fromkeys(words, 0.0)
    unseen = set(words)
    for token, probability in probabilities.items():
        if token.strip() in found:
            found[token.strip()] += probability
            unseen.discard(token.strip())
    mass = sum(found.values()) if read.against else 1.0
    least = min(probabilities.values(), default=1.0)
    if not math.isfinite(mass) or mass <= 0.0:
        listed = ", ".join(repr(token) for token in list(probabilities)[:5])
        raise ValueError(f"none of {', '.join(words)} is among the likeliest first tokens of the judge's reply ({listed})")
    if unseen and not complete and least > UNSEEN_SHARE * mass:
        way_out = "let `prompt` ask for one of these words alone, or score on the ranks (no `engine`, no `placement`), where all tokens are seen"
        raise ValueError(f"the server lists too few tokens to tell how likely {', '.join(sorted(unseen))} is: {way_out}")
    return finite(found[words[0]] / mass, str(dict(list(probabilities.items())[:5]))) * read.scale


def shown(reply: str) -> str:
    """The end of a reply, quoted."""
    return repr(reply if len(reply) <= SHOWN else "..." + reply[-SHOWN:])
