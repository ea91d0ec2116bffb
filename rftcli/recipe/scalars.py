"""One scalar's source text to a value, the way a person means it; what could be meant in two ways is refused with the fix.

YAML 1.1 reads `1e-6` as text, `no` as false, `012` as ten and `1:30` as ninety. Here the key decides: a number key reads `1e-6` as a number, a
text key reads `no` as the text "no", and `012` or `1:30` in the place of a number are refused. What is left out: where the text stands (`read`).
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

TRUE = frozenset({"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
FALSE = frozenset({"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
MOST_DIGITS = 40
"""Longer numbers are a mistake, and Python refuses to read very long ones."""

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)\Z")
_BASED = re.compile(r"[-+]?0(x[0-9a-fA-F]+|o[0-7]+|b[01]+)\Z")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+\Z")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?\Z")
_DECIMAL = re.compile(r"[-+]?([0-9]+(_[0-9]+)*(\.([0-9]+(_[0-9]+)*)?)?|\.[0-9]+(_[0-9]+)*)([eE][-+]?[0-9]{1,6})?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(nan|inf)\Z", re.IGNORECASE)
_NOT_FINITE_WORD = re.compile(r"[-+]?\.?(nan|inf|infinity)\Z", re.IGNORECASE)
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+\Z")


class Misread(Exception):
    """The text is not what the key wants. `args`: what to say behind the caret, or None."""

    @property
    def label(self) -> str | None:
        return self.args[0]


def read_bool(text: str) -> bool:
    """
    >>> read_bool("true"), read_bool("no")
    (True, False)
    """
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise Misread("write true or false" if text.lower() in ("y", "n", "1", "0") else None)


def read_int(text: str) -> int:
    """
    >>> read_int("1_000"), read_int("1e3"), read_int("0x10")
    (1000, 1000, 16)
    """
    _refuse_traps(text)
    if _INTEGER.match(text):
        return int(text)
    if _BASED.match(text):
        return int(text, 0)
    if not _DECIMAL.match(text):
        raise Misread(None)
    exact = Decimal(text)
    if exact != exact.to_integral_value():
        raise Misread("not a whole number")
    whole = f"{exact:.0f}" if exact.adjusted() < MOST_DIGITS else ""
    if "e" not in text.lower():
        raise Misread(f"write {whole}")
    if not whole:
        raise Misread("the number is too large")
    return int(whole)


def read_float(text: str) -> float:
    """
    >>> read_float("1e-6"), read_float("5E-6"), read_float("1_000")
    (1e-06, 5e-06, 1000.0)
    """
    _refuse_traps(text)
    if _NOT_FINITE_WORD.match(text):
        raise Misread("the number must be finite")
    if _BASED.match(text):
        return float(int(text, 0))
    if not _DECIMAL.match(text):
        raise Misread(None)
    value = float(text)
    if not math.isfinite(value):
        raise Misread("the number is too large")
    return value


def read_untyped(text: str) -> str | int | float | bool | None:
    """A plain scalar where any value may stand (`options`).

    >>> [read_untyped(text) for text in ("8", "1e-6", "true", "2024-01-01", "~")]
    [8, 1e-06, True, '2024-01-01', None]
    """
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in TRUE or text in FALSE:
        if text.lower() not in ("true", "false"):
            raise Misread(f'true or false, or the text "{text}" with quotes?')
        return text in TRUE
    if _NOT_FINITE.match(text):
        raise Misread("the number must be finite")
    if _LEADING_ZERO.match(text):
        raise Misread(_zero_fix(text))
    if _INTEGER.match(text) or _BASED.match(text):
        return read_int(text)
    if _DECIMAL.match(text):
        return read_float(text)
    return text


def _refuse_traps(text: str) -> None:
    """What YAML versions or people read in different ways."""
    if len(text) > MOST_DIGITS:
        raise Misread("too long for a number")
    if _LEADING_ZERO.match(text):
        raise Misread(_zero_fix(text))
    if _SEXAGESIMAL.match(text):
        raise Misread("YAML 1.1 reads this to the base of 60: write one number")
    if _GROUPED.match(text):
        raise Misread(f"write {text.replace(',', '')}")
    if text.endswith("%") and _DECIMAL.match(text[:-1].strip()):
        raise Misread(f"write {float(text[:-1]) / 100:g}")


def _zero_fix(text: str) -> str:
    digits = text.lstrip("+-").replace("_", "")
    octal = f" or 0o{digits.lstrip('0')}" if set(digits) <= set("01234567") and digits.strip("0") else ""
    return f"a leading zero means base 8 to some: write {int(digits[:MOST_DIGITS])}{octal}"
