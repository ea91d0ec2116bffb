"""What is told of reference answers that do not get full marks. Leaves out how they are found (`references`), which imports the rules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFinding:
    """References of one set that one rule does not give full marks."""

    source: str
    rule: str
    failed: int
    checked: int
    rows: int
    """Rows of the set, checked or not."""
    examples: tuple[str, ...]
    unreadable: bool = False
    """The rule could never score these rows."""

    @property
    def text(self) -> str:
        some = "" if self.checked == self.rows else f" looked at (of {self.rows})"
        if self.unreadable:
            what = f"rows{some} hold nothing that `{self.rule}` can compare with"
        else:
            what = f"reference answers{some} do not get full marks from `{self.rule}`"
        return (
            f"data set `{self.source}`: {self.failed} of {self.checked} {what}: "
            + "; ".join(self.examples)
        )
