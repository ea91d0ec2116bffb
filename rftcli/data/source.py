"""Which row is drawn when: the order of the data as a function of (data, seed, draw), and the position that a checkpoint keeps.

Draw d belongs to one set, by the weights; within its set, draws go through one keyed permutation of the rows after the other. So any rank can
compute any draw, nothing is dropped at the end of a pass, and a resumed run goes on with the rows it has not seen.
A streamed set (`stream`) is shuffled within blocks. What is left out: reading (`rows`), rendering (`prompts`), and how many completions a draw gets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rftcli.algo.keyed import key64, keyed_permutation
from rftcli.data.prompts import TOO_LONG_HINT, PromptBuilder, too_long
from rftcli.data.rows import Row, fingerprint
from rftcli.data.spec import DataSpec, OverlongPrompt
from rftcli.data.stream import BLOCK_ROWS, OpenReader, StreamedRows
from rftcli.errors import ResumeError, UsageError

if TYPE_CHECKING:
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
    """Deals draws out to sets by weight: each set has its share up to the rounding of a few draws, and exactly after a period.

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


class ListedRows:
    """The rows of a set in memory, by turn: one keyed permutation after the other, without end."""

    def __init__(self, name: str, rows: Sequence[Row], *, seed: int, shuffle: bool) -> None:
        self.num_rows = len(rows)
        self._name = name
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, Sequence[int]] = {}
        self._fingerprint: str | None = None

    def row(self, turn: int) -> Row:
        number, offset = divmod(turn, self.num_rows)
        return self._rows[self._order(number)[offset]]

    def identity(self) -> dict[str, Any]:
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._rows)
        return {"rows": self.num_rows, "fingerprint": self._fingerprint}

    def _order(self, number: int) -> Sequence[int]:
        """The order of the rows in pass `number`."""
        if not self._shuffle:
            return range(self.num_rows)
        if number not in self._orders:
            for old in [other for other in self._orders if other != number - 1]:
                del self._orders[old]  # a batch lies in two passes at most, usually
            self._orders[number] = keyed_permutation(self._seed, "rows", self._name, number, n=self.num_rows)
        return self._orders[number]


class PromptSource:
    """The prompts of a run or of an evaluation set (protocols.Source, protocols.Stateful).

    All prompts are measured at construction, once: too long ones are refused together or dropped, with `counts` per set. `draw` does not depend
    on earlier draws. `next_draw` is one after the furthest draw asked for here; a rank that draws only its part sets it past the others'.
    UsageError if a prompt is too long under `refuse`, if a set has nothing left, or if two sets have one name.
    """

    def __init__(
        self,
        datasets: Sequence[tuple[DataSpec, Sequence[Row] | OpenReader]],
        builder: PromptBuilder,
        *,
        seed: int,
        shuffle: bool,
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        names = [spec.name for spec, _ in datasets]
        if not names or len(set(names)) < len(names):
            raise UsageError("data sets need names of their own" if names else "there is no data set", hint="set `name` of each")
        self.next_draw = 0
        self.counts: dict[str, SetCounts] = {}
        self._specs = [spec for spec, _ in datasets]
        self._builder = builder
        self._seed = seed
        self._shuffle = shuffle
        self._sets: list[ListedRows | StreamedRows] = [
            StreamedRows(spec.name, rows, self._fitting_only, seed=seed, shuffle=shuffle, block_rows=block_rows)
            if callable(rows)
            else ListedRows(spec.name, self._fitting(spec, rows), seed=seed, shuffle=shuffle)
            for spec, rows in datasets
        ]
        phases = [Fraction(key64(seed, "mixture", name) if shuffle else 0, 2**64) for name in names]
        self._interleave = Interleave([spec.weight for spec in self._specs], phases)

    @property
    def num_rows(self) -> int | None:
        """Rows that can be drawn, all sets together; None while the end of a streamed set has not been reached."""
        counts = [rows.num_rows for rows in self._sets]
        return None if None in counts else sum(count for count in counts if count is not None)

    def draw(self, first: int, count: int) -> list[Prompt]:
        """The prompts of draws first..first+count-1."""
        assert first >= 0 and count >= 0, (first, count)
        prompts = [self._builder.build(self.row(draw), draw) for draw in range(first, first + count)]
        self.next_draw = max(self.next_draw, first + count)
        return prompts

    def row(self, draw: int) -> Row:
        """The row of a draw."""
        index, turn = self._interleave.locate(draw)
        return self._sets[index].row(turn)

    @property
    def fingerprint(self) -> str:
        """Of rows and order: what a position, and anything that is remembered of rows, belongs to."""
        return f"{key64(json.dumps(self._identity(), sort_keys=True)):016x}"

    def passes(self, draws: int) -> float | None:
        """How many times `draws` draws go through the data: draws / rows of all sets. With weights, small sets have been seen more often.

        None where the rows are not known.
        """
        return None if self.num_rows is None else draws / self.num_rows

    def state_dict(self) -> dict[str, Any]:
        """Position and identity of the data; JSON-able."""
        streams = {spec.name: rows.state_dict() for spec, rows in zip(self._specs, self._sets, strict=True) if isinstance(rows, StreamedRows)}
        return {"next_draw": self.next_draw, **({"streams": streams} if streams else {}), **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the saved position. ResumeError, naming the set, if the position was counted in other data or another order."""
        mine = self._identity()
        saved, here = ({entry["name"]: entry for entry in sets} for sets in (state["sets"], mine["sets"]))
        for name in {**saved, **here}:
            if name not in saved or name not in here:
                what = "is new" if name not in saved else "is gone"
                raise ResumeError(f"data set `{name}` {what}: the position of the run was counted without this change", hint=_RESUME_HINT)
            for key in {**saved[name], **here[name]}:
                old, new = saved[name].get(key), here[name].get(key)
                if old != new:
                    raise ResumeError(f"data set `{name}` has changed: its {key} was {old} and is {new}", hint=_RESUME_HINT)
        for key, old in state.items():
            if key not in ("next_draw", "streams", "sets") and old != mine[key]:
                raise ResumeError(f"the order of the data has changed: {key} was {old} and is {mine[key]}", hint=_RESUME_HINT)
        if list(saved) != list(here):
            raise ResumeError(f"the order of the data sets has changed: {', '.join(saved)} was first to last", hint=_RESUME_HINT)
        self.next_draw = int(state["next_draw"])
        for spec, rows in zip(self._specs, self._sets, strict=True):
            if isinstance(rows, StreamedRows):
                rows.load_state_dict(state["streams"][spec.name])

    def close(self) -> None:
        """Close files that are open for streamed sets."""
        for rows in self._sets:
            if isinstance(rows, StreamedRows):
                rows.close()

    def _identity(self) -> dict[str, Any]:
        sets = [{"name": spec.name, "weight": spec.weight, **rows.identity()} for spec, rows in zip(self._specs, self._sets, strict=True)]
        return {"seed": self._seed, "shuffle": self._shuffle, "sets": sets}

    def _fitting_only(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of a stretch of a stream that can be drawn."""
        return _drawable(rows, self._builder.lengths(rows), self._builder)[0]

    def _fitting(self, spec: DataSpec, rows: Sequence[Row]) -> list[Row]:
        """The rows that can be drawn, and their counts."""
        kept, self.counts[spec.name] = fit(spec.name, rows, self._builder.lengths(rows), self._builder)
        return kept


def fit(name: str, rows: Sequence[Row], lengths: Sequence[int], builder: PromptBuilder) -> tuple[list[Row], SetCounts]:
    """The rows of a set that can be drawn, of those with these lengths in tokens. UsageError where the policy is to refuse, or if nothing is left."""
    if not rows:
        raise UsageError(f"data set `{name}`: nothing is left to draw: it has no rows")
    kept, num_overlong = _drawable(rows, lengths, builder)
    if not kept:
        why = f"all {len(rows)} prompts need more than {builder.max_prompt_tokens} tokens"
        raise UsageError(f"data set `{name}`: nothing is left to draw: {why}", hint="raise `rollout.max_prompt_tokens`")
    return kept, SetCounts(rows=len(rows), overlong=num_overlong, kept=len(kept))


def _drawable(rows: Sequence[Row], lengths: Sequence[int], builder: PromptBuilder) -> tuple[list[Row], int]:
    """(the rows that can be drawn, how many are too long). UsageError for those where the policy is to refuse."""
    allowed, policy = builder.max_prompt_tokens, builder.overlong
    overlong = [(row, length) for row, length in zip(rows, lengths, strict=True) if length > allowed]
    if overlong and policy is OverlongPrompt.REFUSE:
        row, length = overlong[0]
        more = f" ({len(overlong)} of {len(rows)} rows are too long, the longest needs {max(lengths)} tokens)"
        raise UsageError(too_long(row, length, allowed) + more, hint=TOO_LONG_HINT)
    if policy is OverlongPrompt.DROP:
        return [row for row, length in zip(rows, lengths, strict=True) if length <= allowed], len(overlong)
    for row, _ in overlong:
        builder.build(row, 0)  # a prompt that cannot be cut is found now, not when it is drawn
    return list(rows), len(overlong)
