"""A set that is too large for memory: rows are read while the run goes on, a block at a time, and shuffled within their block.

Which row a turn gets is a function of (data, seed, turn), as for a set in memory: turn t lies in a pass and in a block of it, and the block has a
keyed order of its own for every pass. So any rank finds any turn, and a resumed run goes on exactly; the position only saves reading from the start.
What is left out: ids are not compared with each other, and how many rows there are is known when the end has been reached once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import islice
from typing import Any

from rftcli.algo.keyed import keyed_permutation
from rftcli.data.rows import Position, Row, RowReader, fingerprint
from rftcli.errors import UsageError

BLOCK_ROWS = 8192
"""Rows that are in memory and change places with each other; two blocks at most are kept."""
KEPT_BLOCKS = 2

OpenReader = Callable[[Position], RowReader]


class StreamedRows:
    """Rows by turn, without end. `fitting` takes rows and leaves out those that are too long (or raises)."""

    def __init__(
        self,
        name: str,
        open_reader: OpenReader,
        fitting: Callable[[Sequence[Row]], list[Row]],
        *,
        seed: int,
        shuffle: bool,
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        self.num_rows: int | None = None
        """Rows of one pass, once the end has been reached."""
        self._name = name
        self._open = open_reader
        self._fitting = fitting
        self._seed = seed
        self._shuffle = shuffle
        self._block_rows = block_rows
        self._starts: dict[int, Position] = {0: Position()}  # block -> where it begins
        self._blocks: dict[int, list[Row]] = {}
        self._orders: dict[tuple[int, int], Sequence[int]] = {}
        self._reader: RowReader | None = None
        self._rows: Generator[Row] | None = None
        self._next_block = 0  # of the open reader

    def row(self, turn: int) -> Row:
        """The row of a turn, counted from 0 over all passes."""
        number, index = self._within(turn)
        block, offset = divmod(index, self._block_rows)
        rows = self._block(block)
        return rows[self._order(number, block, len(rows))[offset]]

    def identity(self) -> dict[str, Any]:
        """What must be the same after a resume: the beginning of the set stands for all of it."""
        return {"block_rows": self._block_rows, "fingerprint": fingerprint(self._block(0))}

    def state_dict(self) -> dict[str, Any]:
        block = max(self._starts)
        start = self._starts[block]
        return {"rows": self.num_rows, "block": block, "before": [start.records, start.rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_rows = state["rows"]
        records, rows = state["before"]
        self._starts[int(state["block"])] = Position(records=records, rows=rows)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self._reader = self._rows = None

    def _within(self, turn: int) -> tuple[int, int]:
        """(pass, index in it). Reads the turn's block where it may lie behind the end."""
        block = turn // self._block_rows
        if self.num_rows is None and block + 1 not in self._starts:
            self._load(block)
        return (0, turn) if self.num_rows is None else divmod(turn, self.num_rows)

    def _block(self, block: int) -> list[Row]:
        self._load(block)
        return self._blocks[block]

    def _load(self, block: int) -> None:
        """Bring a block into memory, or find the end of the set before it."""
        if block in self._blocks:
            return
        start = max(start for start in self._starts if start <= block)
        if self._rows is None or not start <= self._next_block <= block:
            self.close()
            self._reader = self._open(self._starts[start])
            self._rows = iter(self._reader)
            self._next_block = start
        while block not in self._blocks and self._rows is not None:
            self._read_block()

    def _read_block(self) -> None:
        """Read the next block of the open reader; at the end of the set, note how many rows there are."""
        assert self._reader is not None and self._rows is not None
        reader, number, rows = self._reader, self._next_block, list[Row]()
        while len(rows) < self._block_rows and not reader.ended:
            fresh = list(islice(self._rows, self._block_rows - len(rows)))
            reader.faults.raise_if_any(reader.num_rows)
            rows += self._fitting(fresh)
        if reader.ended:
            self.num_rows = number * self._block_rows + len(rows)
            if not self.num_rows:
                raise UsageError(f"data set `{self._name}`: nothing is left to draw: it has no rows, or none that fits")
            self.close()
        else:
            self._starts[number + 1] = reader.position
        if rows:
            while len(self._blocks) >= KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = rows
        self._next_block = number + 1

    def _order(self, number: int, block: int, rows: int) -> Sequence[int]:
        if not self._shuffle:
            return range(rows)
        if (number, block) not in self._orders:
            while len(self._orders) >= KEPT_BLOCKS:
                del self._orders[next(iter(self._orders))]
            self._orders[number, block] = keyed_permutation(self._seed, "rows", self._name, number, block, n=rows)
        return self._orders[number, block]
