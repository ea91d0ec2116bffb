"""Where the answer stands in a row that carries one: the assistant's last turn, or a column. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def answer_column(columns: Mapping[str, Any]) -> str | None:
    """The column that holds the answer of a row, if nobody said which."""
    return next((name for name in ANSWERS if columns.get(name) is not None), None)


def split_turns(value: Any) -> tuple[Any, str | None]:
    """(prompt, answer): a list of messages without its last turn if that is the assistant's; anything else as it is, with None."""
    if isinstance(value, list) and len(value) > 1 and isinstance(value[-1], Mapping) and value[-1].get("role") == "assistant":
        return value[:-1], value[-1].get("content")
    return value, None


ANSWERS = ("completion", "answer", "reference")
"""Where the answer is looked for if neither the recipe nor the messages say it, in this order."""
