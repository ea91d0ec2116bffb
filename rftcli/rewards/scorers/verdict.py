"""What a scorer says about one text: the score, and beside it whatever else a service says of that row (`extra_logs`).

Only the score is ever a reward. A number beside it becomes a metric of the step, anything else a column of the samples file; what a service says
in a form that cannot be given to rows becomes a text that says so, so that nothing is lost and nothing is made up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One row's score.

    >>> Verdict(value=0.5, extra={"toxicity": 0.1}).extra["toxicity"]
    0.1
    """

    value: float
    """A finite number."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Name -> plain data, without numbers that are not finite."""


def is_number(value: Any) -> bool:
    """A finite number of JSON that a float can hold; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number of more than 308 digits
        return False


def extras_of_rows(logs: Any, rows: int) -> list[dict[str, Any]]:
    """`extra_logs` of a reply, row by row: a list has one item a row (null: this row has none), anything else is said of every row.

    >>> extras_of_rows({"length": [1, None], "model": "rm-2"}, 2)
    [{'length': 1.0, 'model': 'rm-2'}, {'model': 'rm-2'}]
    """
    found: list[dict[str, Any]] = [{} for _ in range(rows)]
    if not isinstance(logs, Mapping):
        return found if logs is None else [{"extra_logs": f"no mapping of names, but {type(logs).__name__}"} for _ in range(rows)]
    for name, said in logs.items():
        values = said if isinstance(said, list) else [said] * rows
        if len(values) != rows:
            values = [f"{len(values)} values came back for {rows} rows"] * rows
        for row, value in zip(found, values, strict=True):
            if value is not None:
                row[str(name)] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1:  # a column of one number a row
        value = value[0]
    if is_number(value):
        return float(value)
    return value if isinstance(value, (str, bool)) else str(value)
