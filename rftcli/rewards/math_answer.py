"""The rule `math_answer`: is the answer in a text equal to the reference, as mathematics?

What is read where, and which numbers are equal, is said in `find_answer` and `mathtext`; both sides go through the same functions. Equal texts
and plain numbers are settled here. The rest is algebra and goes to math-verify in a helper process, where it can be stopped. Without math-verify
installed, such answers are equal only as text.

The reference may be a text, a number, or a list of which any will do; one with a box or a `####` line is read like an answer, else all of it is
the answer. A reference that cannot be read is a ValueError, whatever the completion says. A time limit or a crash is an error too, never a 0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from rftcli.rewards import mathtext
from rftcli.rewards.find_answer import find_answer
from rftcli.rewards.inputs import HeavyRule, RuleInput, cut_after, references
from rftcli.rewards.rules import READ
from rftcli.rewards.worker import WorkerPool

VERIFY_CHARACTERS = 1000
"""An answer longer than this is equal only as text: math-verify would spend its whole time limit on it."""


def readable_gold(reference: Any) -> str | None:
    r"""The reference as `math_answer` reads it, several joined by " | "; None if it cannot be read. For checks of the data before launch.

    >>> readable_gold("Half of 72 is 36.\n#### 36"), readable_gold(r"\frac{1}{")
    ('36', None)
    """
    try:
        return " | ".join(read_gold(text).text for text in references(reference))
    except ValueError:
        return None


def read_gold(text: str) -> mathtext.Answer:
    """A reference as an answer. ValueError for one that cannot be read."""
    found = find_answer(text, read=("boxed", "hashes"))
    answer = mathtext.read(text if found is None else found)
    if not any(character.isalnum() for character in answer.text):
        raise ValueError(f"the reference answer {text[:200]!r} holds nothing to compare with")
    if not mathtext.balanced(answer.text):
        raise ValueError(f"the reference answer {text[:200]!r} cannot be read: its braces do not balance")
    return answer


class MathAnswer(HeavyRule):
    """`algebra` False does without math-verify; None: use it if it is installed."""

    def __init__(self, algebra: bool | None = None) -> None:
        if algebra is None:
            algebra = importlib.util.find_spec("math_verify") is not None
        self._workers = WorkerPool("rftcli.rewards.math_worker") if algebra else None

    def __call__(self, item: RuleInput, *, after: str | None = None, read: Sequence[str] = READ, time_limit_seconds: float = 5.0) -> float:
        golds = [read_gold(text) for text in references(item.reference)]
        text = cut_after(item.text, after)
        found = None if text is None else find_answer(text, read)
        if found is None:
            return 0.0
        answer = mathtext.read(found)
        verdicts = [mathtext.same(gold, answer) for gold in golds]
        if True in verdicts:
            return 1.0
        unsure = [gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict is None]
        if self._workers is None or len(answer.text) > VERIFY_CHARACTERS or not mathtext.balanced(answer.text):
            return 0.0
        requests = [{"gold": mathtext.canonical(gold), "answer": mathtext.canonical(answer)} for gold in unsure]
        return float(any(self._workers.call(request, time_limit_seconds) for request in requests))

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
