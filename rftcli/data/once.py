"""Sets that cost something to read, read once: a python function may take minutes or cost money, a set of the hub is downloaded.

Leaves out files of this machine: what is found out about them is kept in `probe.cache` for as long as they do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rftcli.data.origin import origin_of
from rftcli.data.rows import Table, read_table
from rftcli.data.spec import DataSpec


class Tables:
    """`read_table` that remembers. One for each command, so that a set is the same wherever the command looks at it. It can be pickled."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[str, ...], int | None], Table] = {}

    def read(self, spec: DataSpec, search_path: Sequence[Path] = (), first: int | None = None) -> Table:
        """As `data.rows.read_table`. An error is not remembered."""
        key = (repr(spec), tuple(map(str, search_path)), first)
        if key in self._kept:
            return self._kept[key]
        table = read_table(spec, search_path, first)
        if not origin_of(spec, search_path).files:
            self._kept[key] = table
        return table
