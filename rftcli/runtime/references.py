r"""Do the data's own reference answers get full marks? A reference that its rule cannot read, or scores below 1, trains the model to be wrong.

First every row is read as its rules would read it: one that cannot be is a finding of its own kind, `unreadable`.

Every rule of a row's label that needs a reference is given the reference itself, written the way the rule looks for it: `\boxed{..}`, after
`####`, in tags. Any such form with full marks will do. Rows are spread evenly over a set, and looking ends after a while. User functions are left
out, because they may cost money or time, and so are rules about form alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rftcli.data.rows import Row
from rftcli.errors import MachineError
from rftcli.rewards import mathtext
from rftcli.rewards.gold import gold_problem
from rftcli.rewards.inputs import HeavyRule, RuleInput, references
from rftcli.rewards.math_answer import readable_gold
from rftcli.rewards.rules import RULES, needs_reference, open_rule
from rftcli.rewards.spec import DEFAULT_LABEL, PartSpec
from rftcli.rewards.worker import WorkerError
from rftcli.runtime.reference_finding import ReferenceFinding

MOST_ROWS = 1000
"""Rows of a set that are scored, evenly spread; a set of fewer rows is scored whole."""
MOST_SECONDS = 10.0
"""All sets together."""
FULL_MARKS = 1.0 - 1e-6
SHOWN = 3
NO_ANSWER = r"\boxed{x_{7}+1}"
"""Equal to no reference, and no number: only algebra can tell, so the reference has to be read as mathematics."""


def check_references(
    sets: Mapping[str, Sequence[Row]], rewards: Mapping[str, Sequence[PartSpec]], clock: Callable[[], float] = time.monotonic
) -> list[ReferenceFinding]:
    """Findings by set and rule; none where all is well."""
    rules: dict[str, Callable[..., Any]] = {}
    deadline = clock() + MOST_SECONDS
    unreadable = [finding for name, rows in sets.items() for finding in _check_reading(name, rows, rewards)]
    broken = {(finding.source, finding.rule) for finding in unreadable}
    try:
        return unreadable + [finding for name, rows in sets.items() for finding in _check_set(name, rows, rewards, rules, lambda: clock() > deadline)
            if (finding.source, finding.rule) not in broken]
    finally:
        for rule in rules.values():
            if isinstance(rule, HeavyRule):
                rule.close()


def written_form(row: Row, part: PartSpec) -> str | None:
    """The first way of writing the row's reference that the rule gives full marks; None: there is none, or it is not looked at here."""
    if part.kind != "rule" or part.target not in WRITTEN or part.target == "code_tests" or row.reference is None:  # programs may run for long
        return None
    rule = open_rule(part.target)
    try:
        return next((answer for answer in _answers(row, part) if (rule(_input(row, answer), **part.options) or 0.0) >= FULL_MARKS), None)
    except Exception:  # what a rule cannot read is told with its score
        return None
    finally:
        if isinstance(rule, HeavyRule):
            rule.close()


def _check_reading(name: str, rows: Sequence[Row], rewards: Mapping[str, Sequence[PartSpec]]) -> Iterator[ReferenceFinding]:
    """Rows whose reference or columns a rule cannot read. Rows without a reference that need one are told of elsewhere, all of them."""
    counts: dict[str, int] = {}
    examples: dict[str, list[str]] = {}
    for row in rows:
        for part in rewards.get(row.label, rewards.get(DEFAULT_LABEL, ())):
            if part.kind != "rule" or part.target not in RULES or (row.reference is None and needs_reference(part.target, part.options)):
                continue
            problem = gold_problem(part.target, row.reference, row.columns, part.options)
            if problem is not None:
                counts[part.name] = counts.get(part.name, 0) + 1
                if counts[part.name] <= SHOWN:
                    examples.setdefault(part.name, []).append(f"{row.place}: {problem}")
    for rule, found in examples.items():
        yield ReferenceFinding(
            source=name, rule=rule, failed=counts[rule], checked=len(rows), rows=len(rows), examples=tuple(found), unreadable=True
        )


def _check_set(
    name: str, rows: Sequence[Row], rewards: Mapping[str, Sequence[PartSpec]], rules: dict[str, Callable[..., Any]], late: Callable[[], bool]
) -> Iterator[ReferenceFinding]:
    checked: dict[str, int] = {}
    failed: dict[tuple[str, bool], list[str]] = {}
    counts: dict[tuple[str, bool], int] = {}
    step = max(1, -(-len(rows) // MOST_ROWS))
    for row in rows[::step]:
        if late():
            break
        parts = rewards.get(row.label, rewards.get(DEFAULT_LABEL, ()))
        for part in parts:
            if part.kind != "rule" or part.target not in WRITTEN or row.reference is None or _is_tests(part):
                continue
            if part.target not in rules:
                try:
                    rules[part.target] = open_rule(part.target)
                except MachineError:  # the package is asked for elsewhere
                    continue
            checked[part.name] = checked.get(part.name, 0) + 1
            problem, unreadable = _problem(row, part, rules[part.target])
            if problem is not None:
                kind = (part.name, unreadable)
                counts[kind] = counts.get(kind, 0) + 1
                failed.setdefault(kind, [])
                if len(failed[kind]) < SHOWN:
                    failed[kind].append(f"{row.place}: {problem}")
    for (rule, unreadable), examples in failed.items():
        yield ReferenceFinding(
            source=name, rule=rule, failed=counts[rule, unreadable], checked=checked[rule], rows=len(rows), examples=tuple(examples),
            unreadable=unreadable,
        )  # fmt: skip


def _problem(row: Row, part: PartSpec, rule: Callable[..., Any]) -> tuple[str | None, bool]:
    """(why a row's reference does not get full marks, or None if it does; whether the rule says that it cannot read it)"""
    shown = repr(row.reference)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    best = 0.0
    try:
        for answer in _answers(row, part):
            best = max(best, rule(_input(row, answer), **part.options) or 0.0)
            if best >= FULL_MARKS:
                break
        if part.target == "math_answer" and best >= FULL_MARKS and any(map(_needs_algebra, references(row.reference))):
            rule(_input(row, _after(NO_ANSWER, part.options)), **part.options)
    except TimeoutError:
        return (None if best >= FULL_MARKS else f"{shown} takes too long"), False
    except Exception as caught:  # a rule says in its error what it cannot read
        error = str(caught).partition("\n")[0] or type(caught).__name__
        unreadable = isinstance(caught, ValueError) or (isinstance(caught, WorkerError) and error.startswith("ValueError"))
        return error, unreadable
    return (None if best >= FULL_MARKS else f"{shown} scores {best:g}"), False


def _answers(row: Row, part: PartSpec) -> list[str]:
    """Every way of writing the row's reference."""
    return [answer for text in references(row.reference) for answer in WRITTEN[part.target](text, part.options)]


def _is_tests(part: PartSpec) -> bool:
    """Is the reference what answers are tested with, and no answer?"""
    return part.target == "code_tests" and part.options.get("tests") is None


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


def _solution(text: str, options: Mapping[str, Any]) -> list[str]:
    """The reference as a program, where the tests are in a column of their own; else it holds the tests."""
    return [] if options.get("tests") is None else [_after(f"```python\n{text}\n```", options)]


# Rule -> how a model would write a reference so that the rule finds it. To add one: a function (text, options) of the forms to try; a rule that is
# not here is not checked. `regex` is not: a pattern does not say how to write what it finds.
WRITTEN: dict[str, Callable[[str, Mapping[str, Any]], list[str]]] = {
    "choice": lambda text, options: [_after(rf"\boxed{{{text}}}", options)],
    "code_tests": _solution,
    "exact": lambda text, options: [_after(text, options)],
    "f1": lambda text, options: [_after(text, options)],
    "math_answer": _math,
    "reasoning_gym": _gym,
}
