"""What a plan says about rewards, as plain data that goes through JSON both ways.

Leaves out what the words mean: rules are in `rules`, user functions in `functions`, sums and other ways to combine in `combine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rftcli.errors import UsageError

DEFAULT_LABEL = "default"
"""The entry of the reward table that serves rows whose label has none of its own."""

KINDS = ("rule", "python", "model")
"""rule: `target` is a key of `rules.RULES`. python: `target` is `package.module:function`. model: `target` is the name of a scorer."""
ON_ERROR = ("fail_sample", "abstain", "stop")
"""What an error of a part does. fail_sample: the sample has no reward. abstain: the part is left out of the sum. stop: the run ends."""
TEXTS = ("clean", "keep_special")
"""Which decoding of the answer a part reads: without or with special tokens."""
COMBINES = ("sum", "product", "min", "gate", "python")
"""How parts become one reward; what each does is in `combine`."""
MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """One weighted part of one label's reward. UsageError for a word that is none of those above, and for a weight that is not a sane number.

    >>> PartSpec(name="correct", kind="rule", target="math_answer", weight=0.9).on_error
    'fail_sample'
    """

    name: str
    kind: str
    target: str
    weight: float = 1.0
    """Weights are used as they are, never renormalised. 0: the part is logged and takes no part in the reward."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the rule or function, by name."""
    on_error: str = "fail_sample"
    text: str = "clean"
    clip: tuple[float, float] | None = None
    """(lowest, highest) value of the part, before its weight."""
    timeout_seconds: float | None = None
    """A part that takes longer has failed."""

    def __post_init__(self) -> None:
        for name, value, allowed in (("kind", self.kind, KINDS), ("on_error", self.on_error, ON_ERROR), ("text", self.text, TEXTS)):
            if value not in allowed:
                raise UsageError(f"reward part `{self.name}`: {name} `{value}` is unknown", hint=f"one of {', '.join(allowed)}")
        if not abs(self.weight) <= MAX_WEIGHT:  # nan too
            raise UsageError(f"reward part `{self.name}`: the weight must be a number within +-{MAX_WEIGHT:g}, got {self.weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineSpec:
    """How the parts of one label become its reward. UsageError for a word that is none of COMBINES.

    >>> CombineSpec(how="min").renormalise
    False
    """

    how: str = "sum"
    target: str | None = None
    """`package.module:function`, where `how` is python."""
    options: Mapping[str, Any] = field(default_factory=dict)
    renormalise: bool = False
    """Of a sum: parts that abstained give their weight to those that did not."""

    def __post_init__(self) -> None:
        if self.how not in COMBINES:
            raise UsageError(f"parts cannot be combined by `{self.how}`", hint=f"one of {', '.join(COMBINES)}")


PLAIN_SUM = CombineSpec()
