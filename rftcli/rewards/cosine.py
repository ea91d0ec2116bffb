"""The rule `cosine_length`: another rule says what is right, and length says how much it is worth (arXiv:2502.03373).

Along half a cosine over 0..max_tokens, a right answer's value goes from `right[0]` (short) to `right[1]` (long), a wrong one's from `wrong[0]` to
`wrong[1]`: by default right answers should be short, and wrong ones may go on thinking. Longer answers count as max_tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rftcli.rewards.inputs import HeavyRule, RuleInput

FULL_MARKS = 1.0 - 1e-6
RIGHT, WRONG = (1.0, 0.5), (-1.0, -0.5)
"""Values of the shortest and the longest answer."""


class CosineLength(HeavyRule):
    """Opens the rules that say what is right when they are first asked."""

    def __init__(self) -> None:
        self._rules: dict[str, Callable[..., Any]] = {}

    def __call__(
        self,
        item: RuleInput,
        *,
        max_tokens: int,
        rule: str = "math_answer",
        rule_options: Mapping[str, Any] | None = None,
        right: Sequence[float] = RIGHT,
        wrong: Sequence[float] = WRONG,
    ) -> float | None:
        """None where the inner rule abstains; whatever it raises."""
        value = self._open(rule)(item, **(rule_options or {}))
        if value is None:
            return None
        short, long = right if value >= FULL_MARKS else wrong
        return cosine(item.tokens / max_tokens, short, long)

    def _open(self, name: str) -> Callable[..., Any]:
        from rftcli.rewards.rules import open_rule  # the table names this rule

        if name not in self._rules:
            self._rules.setdefault(name, open_rule(name))
        return self._rules[name]

    def close(self) -> None:
        for rule in self._rules.values():
            if isinstance(rule, HeavyRule):
                rule.close()


def cosine(progress: float, short: float, long: float) -> float:
    """From `short` at 0 to `long` at 1 and beyond.

    >>> [round(cosine(progress, 1.0, 0.5), 6) for progress in (0.0, 0.25, 0.5, 1.0, 3.0)]
    [1.0, 0.926777, 0.75, 0.5, 0.5]
    """
    return long + (short - long) * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2
