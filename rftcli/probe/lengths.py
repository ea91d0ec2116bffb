"""Lengths of prompts in tokens: what they are, which are too long, and a small table for a person. The tokenizer is the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftcli.data.source import SetCounts

BAR = 30
"""Characters of the longest bar of the histogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFacts:
    """Prompts of one set; all lengths in tokens, before any cut.

    >>> LengthFacts.of("train", [3, 5, 9, 40], allowed=16, counts=SetCounts(rows=4, overlong=1, kept=3), policy="drop").median
    5
    """

    name: str
    rows: int
    overlong: int
    kept: int
    """Rows that can be drawn: without those that are dropped."""
    policy: str
    allowed: int
    complete: bool
    """False: only the first rows of a streamed set were measured."""
    shortest: int
    median: int
    p90: int
    p99: int
    longest: int
    buckets: tuple[tuple[int, int], ...]
    """((largest length in it, number of rows), ...), powers of two."""

    @classmethod
    def of(cls, name: str, lengths: Sequence[int], *, allowed: int, counts: SetCounts, policy: str, complete: bool = True) -> LengthFacts:
        ordered = sorted(lengths)
        buckets: dict[int, int] = {}
        for length in ordered:
            top = 1 << max(0, length - 1).bit_length()
            buckets[top] = buckets.get(top, 0) + 1

        def quantile(share: float) -> int:
            """The smallest length that at least this share of the rows does not exceed."""
            return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]

        return cls(
            name=name, rows=counts.rows, overlong=counts.overlong, kept=counts.kept, policy=policy, allowed=allowed, complete=complete,
            shortest=ordered[0], median=quantile(0.5), p90=quantile(0.9), p99=quantile(0.99), longest=ordered[-1], buckets=tuple(buckets.items()),
        )  # fmt: skip


def overlong_text(facts: LengthFacts) -> str | None:
    """The sentence about prompts that are too long; None if none is."""
    if not facts.overlong:
        return None
    done = {"drop": "dropped", "cut_left": "cut on the left", "cut_right": "cut on the right"}[facts.policy]
    first = "" if facts.complete else "first "
    return f"data set `{facts.name}`: {facts.overlong} of the {first}{facts.rows} prompts are longer than {facts.allowed} tokens and are {done}"


def lengths_text(sets: Sequence[LengthFacts]) -> str:
    """A table of all sets, and a histogram of each."""
    head = ("prompt tokens", "rows", "min", "median", "p90", "p99", "max", "too long")
    table = [head]
    for one in sets:
        long = f"{one.overlong} ({one.policy})" if one.overlong else "0"
        numbers = (one.rows, one.shortest, one.median, one.p90, one.p99, one.longest)
        table.append((one.name if one.complete else f"{one.name} (first rows)", *map(str, numbers), long))
    widths = [max(len(row[index]) for row in table) for index in range(len(head))]
    lines = [
        "  ".join(f"{cell:<{width}}" if index == 0 else f"{cell:>{width}}" for index, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in table
    ]
    for one in sets:
        most, below = max(count for _, count in one.buckets), 0
        labels = []
        for top, count in one.buckets:
            labels.append((f"{below + 1}-{top}" if top > below + 1 else str(top), count))
            below = top
        width, digits = max(len(label) for label, _ in labels), len(str(most))
        lines += [f"{one.name}:", *(f"  {label:>{width}}  {count:>{digits}}  {'#' * max(1, count * BAR // most)}" for label, count in labels)]
    return "\n".join(lines)
