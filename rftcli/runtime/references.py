r"""Do the data's own reference answers get full marks? A reference that its rule cannot read, or scores below 1, trains the model to be wrong.

Every rule of a row's label that needs a reference is given the reference itself, written the way the rule looks for it: `\boxed{..}`, after
`####`, in tags. Any such form with full marks will do. Rows are spread evenly over a set, and looking ends after a while. User functions are left
out, because they may cost money or time, and so are rules about form alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftcli.data.rows import Row
from rftcli.errors import MachineError
from rftcli.rewards import mathtext
from rftcli.rewards.inputs import HeavyRule, RuleInput, references
from rftcli.rewards.math_answer import readable_gold
from rftcli.rewards.rules import open_rule
from rftcli.rewards.spec import DEFAULT_LABEL, PartSpec

MOST_ROWS = 1000
"""Rows of a set that are scored, evenly spread; a set of fewer rows is scored whole."""
MOST_SECONDS = 10.0
"""All sets together."""
FULL_MARKS = 1.0 - 1e-6
SHOWN = 3
NO_ANSWER = r"\boxed{x_{7}+1}"
"""Equal to no reference, and no number: only algebra can tell, so the reference has to be read as mathematics."""


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

    @property
    def text(self) -> str:
        some = "" if self.checked == self.rows else f" looked at (of {self.rows})"
        return (
            f"data set `{self.source}`: {self.failed} of {self.checked} reference answers{some} do not get full marks from `{self.rule}`: "
            + "; ".join(self.examples)
        )


def check_references(
    sets: Mapping[str, Sequence[Row]], rewards: Mapping[str, Sequence[PartSpec]], clock: Callable[[], float] = time.monotonic
) -> list[ReferenceFinding]:
    """Findings by set and rule; none where all is well."""
    rules: dict[str, Callable[..., Any]] = {}
    deadline = clock() + MOST_SECONDS
    try:
        return [finding for name, rows in sets.items() for finding in _check_set(name, rows, rewards, rules, lambda: clock() > deadline)]
    finally:
        for rule in rules.values():
            if isinstance(rule, HeavyRule):
                rule.close()


def _check_set(
    name: str, rows: Sequence[Row], rewards: Mapping[str, Sequence[PartSpec]], rules: dict[str, Callable[..., Any]], late: Callable[[], bool]
) -> Iterator[ReferenceFinding]:
    checked: dict[str, int] = {}
    failed: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    step = max(1, -(-len(rows) // MOST_ROWS))
    for row in rows[::step]:
        if late():
            break
        parts = rewards.get(row.label, rewards.get(DEFAULT_LABEL, ()))
        for part in parts:
            if part.kind != "rule" or part.target not in WRITTEN or row.reference is None:
                continue
            if part.target not in rules:
                try:
                    rules[part.target] = open_rule(part.target)
                except MachineError:  # the package is asked for elsewhere
                    continue
            checked[part.name] = checked.get(part.name, 0) + 1
            problem = _problem(row, part, rules[part.target])
            if problem is not None:
                counts[part.name] = counts.get(part.name, 0) + 1
                failed.setdefault(part.name, [])
                if len(failed[part.name]) < SHOWN:
                    failed[part.name].append(f"{row.place}: {problem}")
    for rule, examples in failed.items():
        yield ReferenceFinding(source=name, rule=rule, failed=counts[rule], checked=checked[rule], rows=len(rows), examples=tuple(examples))


def _problem(row: Row, part: PartSpec, rule: Callable[..., Any]) -> str | None:
    """Why a row's reference does not get full marks; None if it does."""
    shown = repr(row.reference)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    best, error = 0.0, None
    try:
        texts = references(row.reference)
        answers = [answer for text in texts for answer in WRITTEN[part.target](text, part.options)]
        for answer in answers:
            best = max(best, rule(_input(row, answer), **part.options) or 0.0)
            if best >= FULL_MARKS:
                break
        if part.target == "math_answer" and best >= FULL_MARKS and any(map(_needs_algebra, texts)):
            rule(_input(row, _after(NO_ANSWER, part.options)), **part.options)
    except TimeoutError:
        return None if best >= FULL_MARKS else f"{shown} takes too long"
    except Exception as caught:  # a rule says in its error what it cannot read
        error = str(caught).partition("\n")[0] or type(caught).__name__
    if error is not None:
        return error
    return None if best >= FULL_MARKS else f"{shown} scores {best:g}"


def _needs_algebra(text: str) -> bool:
    gold = readable_gold(text)
    return gold is not None and mathtext.read(gold).number is None and not mathtext.is_words(gold)


def _input(row: Row, text: str) -> RuleInput:
    return RuleInput(text=text, prompt_text="", reference=row.reference, columns=row.columns, tokens=1, finish="stop", label=row.label, sample=0)


def _after(text: str, options: Mapping[str, Any]) -> str:
    """The answer behind what the rule waits for."""
    return f"{options.get('after') or ''}{text}"


def _math(text: str, options: Mapping[str, Any]) -> list[str]:
    read = options.get("read", ("boxed", "hashes", "number"))
    forms = {"boxed": rf"\boxed{{{text}}}", "hashes": f"#### {text}", "number": text}
    own = [text] if "####" in text or r"\boxed" in text else []
    return [_after(form, options) for form in (*own, *(forms[place] for place in read if place in forms))]


def _gym(text: str, options: Mapping[str, Any]) -> list[str]:
    forms = {"whole": text, "last_line": f"so\n{text}", "answer_tag": f"<answer>{text}</answer>", "last_number": text}
    return [_after(forms[options.get("extract", "whole")], options)]


# Rule -> how a model would write a reference so that the rule finds it. To add one: a function (text, options) of the forms to try; a rule that is
# not here is not checked. `regex` is not: a pattern does not say how to write what it finds.
WRITTEN: dict[str, Callable[[str, Mapping[str, Any]], list[str]]] = {
    "exact": lambda text, options: [_after(text, options)],
    "math_answer": _math,
    "reasoning_gym": _gym,
}
