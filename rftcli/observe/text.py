"""Text for people: short numbers, durations, sparklines, and foreign text made safe for a terminal.

Leaves out layout and colour; those belong to the observer that prints.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import TextIO

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-OQ-WYZ`-~])")
"""Terminal control sequences: CSI, the string kinds (titles, links) when they are closed, and the short ones."""
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
MAX_PATH = 4096
_READ_PER_KEPT = 8
"""How many characters are looked at for each one kept: a text of control sequences alone must not cost its whole length."""
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"


def clean(text: str, limit: int, *, lines: bool = False) -> str:
    """At most `limit` characters of `text` that cannot move a cursor, colour a screen, or break an encoder.

    Control sequences vanish, invisible controls and lone surrogates become U+FFFD, tabs become spaces. Line breaks of all kinds become spaces,
    or stay as plain newlines with `lines`. A cut text ends in "...".
    """
    window = text[: limit * _READ_PER_KEPT + 64]
    safe = "".join(_safe(character, lines) for character in _ESCAPES.sub("", window.replace("\r\n", "\n")))
    if len(safe) <= limit and len(window) == len(text):
        return safe
    return safe[: max(limit - 3, 0)] + "..."[:limit]


def first_line(text: str, limit: int) -> str:
    """The first line that says something, cleaned: the headline of a cause whose other lines are a hint or a log."""
    return clean(text.strip().split("\n", 1)[0], limit)


def path_end(path: str, limit: int) -> str:
    """A path of at most `limit` characters; of a longer one the last two components, which are what tells paths apart."""
    whole = clean(path, MAX_PATH)
    if len(whole) <= limit:
        return whole
    end = "/".join(whole.rstrip("/").split("/")[-2:])
    return f".../{end[-(limit - 4) :]}"


def _safe(character: str, lines: bool) -> str:
    if character in _LINE_BREAKS:
        return "\n" if lines else " "
    if character == "\t":
        return "    "
    # Cf holds the marks that turn the direction of a line; the joiners in it build ordinary emoji and scripts
    if unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in "\u200c\u200d":
        return "\ufffd"
    return character


def short(value: float) -> str:
    """About three digits in at most seven characters: 0.531, 12.3, 4821, 1.2e-4, nan."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e5 or size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.01 else 4
    return f"{value:.{digits}f}"


def several(count: float, one: str) -> str:
    """
    >>> several(1, "step"), several(0, "step"), several(1200, "prompt")
    ('1 step', '0 steps', '1200 prompts')
    """
    return f"{count:.0f} {one}{'' if count == 1 else 's'}"


def columns_of(stream: TextIO) -> int | None:
    """Of the terminal that a stream writes to; None for a file or a pipe, where lines are as long as they are."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # no terminal; a stream without a file, or a closed one
        return None


def wrapped(line: str, columns: int | None, indent: int) -> str:
    """A line broken between words at a terminal's width, what follows indented; paths and other long words stay whole.

    >>> wrapped("  time  learn 61%, rollout 33%", 24, 8)
    '  time  learn 61%,\\n        rollout 33%'
    """
    if columns is None or len(line) <= columns:
        return line
    return textwrap.fill(line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def percent(share: float) -> str:
    """A share of 1 as whole per cent; a share that is not quite all or none never looks like it."""
    if not math.isfinite(share):
        return short(share)
    if 0 < share < 0.01:
        return "<1%"
    return f"{min(share, 0.99) * 100:.0f}%" if share < 1 else f"{share * 100:.0f}%"


def duration(seconds: float, *, coarse: bool = False) -> str:
    """9.4s, 3m05s, 2h07m, 3d04h; `coarse` leaves out the seconds from ten minutes on."""
    if not math.isfinite(seconds):
        return f"{short(seconds)}s"
    if seconds < 59.95:
        return f"{max(seconds, 0.0):.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if coarse and 10 <= minutes < 60:
        return f"{minutes}m"
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"


def interval(value: float, low: float | None, high: float | None) -> str:
    """`0.512 [0.431,0.593]`, or the value alone where there is no interval."""
    return short(value) if low is None or high is None else f"{short(value)} [{short(low)},{short(high)}]"


def sparkline(steps: Sequence[float], values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """A curve of at most `width` characters: the steps are cut into that many equal stretches, each drawn at its mean.

    Points that are not finite are left out; a stretch without points repeats the one before it. Nothing to draw is the empty string.
    """
    points = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if not points or width < 1:
        return ""
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    first, span = points[0][0], points[-1][0] - points[0][0]
    columns = min(width, len(points))
    sums, counts = [0.0] * columns, [0] * columns
    for step, value in points:
        column = min(int((step - first) / span * columns), columns - 1) if span else columns - 1
        sums[column] += value
        counts[column] += 1
    means = [s / n if n else None for s, n in zip(sums, counts, strict=True)]
    known = [m for m in means if m is not None]
    low, height = min(known), max(known) - min(known)
    drawn, last = [], known[0]
    for mean in means:
        last = last if mean is None else mean
        level = (last - low) / height if height > 0 and math.isfinite(height) else 0.5
        drawn.append(blocks[min(int(level * len(blocks)), len(blocks) - 1)])
    return "".join(drawn)
