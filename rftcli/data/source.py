"""Which row is drawn when: the order of the data as a function of (data, seed, draw), and the position that a checkpoint keeps.

Draw d belongs to one set, by the weights; within its set, draws go through one keyed permutation of the rows after the other. So any rank can
compute any draw, nothing is dropped at the end of a pass, and a resumed run goes on with the rows it has not seen.
What is left out: reading (`rows`), rendering (`prompts`), and how many completions a draw gets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rftcli.algo.keyed import key64, keyed_permutation
from rftcli.data.prompts import TOO_LONG_HINT, PromptBuilder, too_long
from rftcli.data.rows import Row, fingerprint
from rftcli.data.spec import DataSpec, OverlongPrompt
from rftcli.errors import ResumeError, UsageError
from rftcli.types import Prompt

_RESUME_HINT = "bring the data back as it was, or let it start over at its first row: `rft resume RUN_DIR --accept`"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetCounts:
    """Rows of one set after the length check.

    >>> SetCounts(rows=10, overlong=2, kept=8).kept
    8
    """

    rows: int
    overlong: int
    """Rows with a longer prompt than allowed: dropped under `drop`, cut when drawn under `cut_left` and `cut_right`."""
    kept: int
    """Rows that can be drawn."""


class Interleave:
    """Deals draws out to sets by weight: in every stretch, each set has its share up to a rounding of a draw or two, and exactly after a period.

    The first set is split from the rest by the rounded line d * share, the second from the rest of the rest, and so on. Exact arithmetic: a
    weight is the decimal number it was written as. `phases` (one per set, in [0, 1)) shift the lines; all 0 gives the first set the first draw.
    """

    def __init__(self, weights: Sequence[float], phases: Sequence[Fraction]) -> None:
        parts = [Fraction(str(weight)) for weight in weights]
        self._shares = [part / sum(parts[index:]) for index, part in enumerate(parts)]  # of what the sets before have left over
        self._phases = list(phases)

    def locate(self, draw: int) -> tuple[int, int]:
        """(index of the set, how many earlier draws it had). O(sets)."""
        for index, (share, phase) in enumerate(zip(self._shares, self._phases, strict=True)):
            before = math.ceil(draw * share - phase)
            if math.ceil((draw + 1) * share - phase) > before:
                return index, before
            draw -= before
        raise AssertionError("the last set takes what is left")


class PromptSource:
    """The prompts of a run or of an evaluation set (protocols.Source, protocols.Stateful).

    All prompts are measured at construction, once: too long ones are refused together or dropped, with `counts` per set. `draw` does not depend
    on earlier draws. `next_draw` is one after the furthest draw asked for here; a rank that draws only its part sets it past the others'.
    UsageError if a prompt is too long under `refuse`, if a set has nothing left, or if two sets have one name.
    """

    def __init__(self, datasets: Sequence[tuple[DataSpec, Sequence[Row]]], builder: PromptBuilder, *, seed: int, shuffle: bool) -> None:
        names = [spec.name for spec, _ in datasets]
        if not names or len(set(names)) < len(names):
            raise UsageError("data sets need names of their own" if names else "there is no data set", hint="set `name` of each")
        self.next_draw = 0
        self.counts: dict[str, SetCounts] = {}
        self._specs = [spec for spec, _ in datasets]
        self._builder = builder
        self._seed = seed
        self._shuffle = shuffle
        self._rows = [self._fitting(spec, rows) for spec, rows in datasets]
        phases = [Fraction(key64(seed, "mixture", name) if shuffle else 0, 2**64) for name in names]
        self._interleave = Interleave([spec.weight for spec in self._specs], phases)
        self._orders: dict[tuple[int, int], Sequence[int]] = {}
        self._fingerprints: dict[str, str] = {}

    @property
    def num_rows(self) -> int:
        """Rows that can be drawn, all sets together."""
        return sum(len(rows) for rows in self._rows)

    def draw(self, first: int, count: int) -> list[Prompt]:
        """The prompts of draws first..first+count-1."""
        assert first >= 0 and count >= 0, (first, count)
        prompts = [self._builder.build(self.row(draw), draw) for draw in range(first, first + count)]
        self.next_draw = max(self.next_draw, first + count)
        return prompts

    def row(self, draw: int) -> Row:
        """The row of a draw."""
        index, turn = self._interleave.locate(draw)
        rows = self._rows[index]
        number, offset = divmod(turn, len(rows))
        return rows[self._order(index, number)[offset]]

    def passes(self, draws: int) -> float:
        """How many times `draws` draws go through the data: draws / rows of all sets. With weights, small sets have been seen more often."""
        return draws / self.num_rows

    def state_dict(self) -> dict[str, Any]:
        """Position and identity of the data; JSON-able."""
        return {"next_draw": self.next_draw, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the saved position. ResumeError, naming the set, if the position was counted in other data or another order."""
        mine = self._identity()
        saved, here = ({entry["name"]: entry for entry in sets} for sets in (state["sets"], mine["sets"]))
        for name in {**saved, **here}:
            if name not in saved or name not in here:
                what = "is new" if name not in saved else "is gone"
                raise ResumeError(f"data set `{name}` {what}: the position of the run was counted without this change", hint=_RESUME_HINT)
            for key, old in saved[name].items():
                new = here[name][key]
                if old != new:
                    raise ResumeError(f"data set `{name}` has changed: its {key} was {old} and is {new}", hint=_RESUME_HINT)
        for key, old in state.items():
            if key not in ("next_draw", "sets") and old != mine[key]:
                raise ResumeError(f"the order of the data has changed: {key} was {old} and is {mine[key]}", hint=_RESUME_HINT)
        if list(saved) != list(here):
            raise ResumeError(f"the order of the data sets has changed: {', '.join(saved)} was first to last", hint=_RESUME_HINT)
        self.next_draw = int(state["next_draw"])

    def _identity(self) -> dict[str, Any]:
        sets = [
            {"name": spec.name, "weight": spec.weight, "rows": len(rows), "fingerprint": self._fingerprint(spec.name, rows)}
            for spec, rows in zip(self._specs, self._rows, strict=True)
        ]
        return {"seed": self._seed, "shuffle": self._shuffle, "sets": sets}

    def _fingerprint(self, name: str, rows: Sequence[Row]) -> str:
        if name not in self._fingerprints:
            self._fingerprints[name] = fingerprint(rows)
        return self._fingerprints[name]

    def _order(self, index: int, number: int) -> Sequence[int]:
        """The order of a set's rows in its pass `number`."""
        if not self._shuffle:
            return range(len(self._rows[index]))
        if (index, number) not in self._orders:
            for old in [key for key in self._orders if key[0] == index and key[1] != number - 1]:
                del self._orders[old]  # a batch lies in two passes at most, usually
            self._orders[index, number] = keyed_permutation(self._seed, "rows", self._specs[index].name, number, n=len(self._rows[index]))
        return self._orders[index, number]

    def _fitting(self, spec: DataSpec, rows: Sequence[Row]) -> list[Row]:
        """The rows that can be drawn, and their counts."""
        allowed, policy = self._builder.max_prompt_tokens, self._builder.overlong
        lengths = [self._builder.num_tokens(row) for row in rows]
        overlong = [(row, length) for row, length in zip(rows, lengths, strict=True) if length > allowed]
        if overlong and policy is OverlongPrompt.REFUSE:
            row, length = overlong[0]
            more = f" ({len(overlong)} of {len(rows)} rows are too long, the longest needs {max(lengths)} tokens)"
            raise UsageError(too_long(row, length, allowed) + more, hint=TOO_LONG_HINT)
        if policy is OverlongPrompt.DROP:
            kept = [row for row, length in zip(rows, lengths, strict=True) if length <= allowed]
        else:
            kept = list(rows)
            for row, _ in overlong:
                self._builder.build(row, 0)  # a prompt that cannot be cut is found now, not when it is drawn
        if not kept:
            why = f"all {len(rows)} prompts need more than {allowed} tokens" if rows else "it has no rows"
            raise UsageError(f"data set `{spec.name}`: nothing is left to draw: {why}", hint="raise `rollout.max_prompt_tokens`" if rows else None)
        self.counts[spec.name] = SetCounts(rows=len(rows), overlong=len(overlong), kept=len(kept))
        return kept
