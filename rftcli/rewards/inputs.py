"""What a rule is given, and the two things every rule needs: the part of the text that counts, and the references as texts.

Leaves out the rules themselves (`simple`, `math_answer`, `gym`) and their table (`rules`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInput:
    """What a rule sees of one completion.

    >>> RuleInput(text="4", prompt_text="2+2=", reference="4", columns={}, tokens=2, finish="stop", label="math", sample=0).reference
    '4'
    """

    text: str
    """The answer alone, never the prompt; a prefill of the answer is in front of it if the plan scores prefills."""
    prompt_text: str
    reference: Any
    columns: Mapping[str, Any]
    tokens: int
    """Sampled tokens, the end token included, a prefill not."""
    finish: str
    """stop, length or abort."""
    label: str
    sample: int


class HeavyRule(ABC):
    """A rule that owns something, such as helper processes. The table makes one object per rule and closes it."""

    @abstractmethod
    def __call__(self, item: RuleInput, **options: Any) -> float | None: ...

    @abstractmethod
    def close(self) -> None: ...

    def warm(self) -> None:
        """Start what every call needs, without waiting for it. A rule that owns nothing of the kind does nothing."""
        return


def cut_after(text: str, delimiter: str | None) -> str | None:
    """What follows the last `delimiter`; all of it for None. None: the delimiter is not there, so there is no answer.

    >>> cut_after("a</think>b", "</think>"), cut_after("b", None), cut_after("b", "</think>")
    ('b', 'b', None)
    """
    if delimiter is None:
        return text
    _, found, tail = text.rpartition(delimiter)
    return tail if found else None


def references(reference: Any) -> list[str]:
    """The reference answers as texts: one text or number, or a list of them, any of which will do. ValueError for anything else."""
    items = list(reference) if isinstance(reference, (list, tuple)) else [reference]
    if not items:
        raise ValueError("the list of reference answers is empty")
    for item in items:
        if item is None:
            raise ValueError("the row has no reference answer")
        if not isinstance(item, (str, int, float)) or isinstance(item, bool):
            raise ValueError(f"a reference answer must be text or a number, got {type(item).__name__}")
    return [str(item) for item in items]
