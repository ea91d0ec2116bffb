"""Can a rule read what a row gives it to compare with? Asked for every row before a run starts: such a row could only fail, or reward the wrong.

Leaves out whether the reference is any good (`runtime.references` scores it), rules that compare with nothing, and user functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rftcli.rewards import choice, code_tests, gym, instructions, json_form
from rftcli.rewards.inputs import references
from rftcli.rewards.math_answer import read_gold
from rftcli.rewards.rules import RULES

Columns = Mapping[str, Any]


def gold_problem(rule: str, reference: Any, columns: Columns, options: Mapping[str, Any]) -> str | None:
    """Why the row cannot be scored by the rule, in one line; None if it can be.

    >>> gold_problem("choice", "Paris", {}, {}), gold_problem("choice", "(B)", {}, {})
    ("the reference 'Paris' is no choice of A, B, C, D, E, F, G, H, I, J", None)
    """
    reader = GOLD.get(rule)
    if reader is None:
        return None
    try:
        reader(reference, columns, {**RULES[rule].options, **options})
    except ValueError as error:
        return str(error).partition("\n")[0]
    return None


def _texts(reference: Any, columns: Columns, options: Mapping[str, Any]) -> None:
    references(reference)


def _math(reference: Any, columns: Columns, options: Mapping[str, Any]) -> None:
    for text in references(reference):
        read_gold(text)


def _choice(reference: Any, columns: Columns, options: Mapping[str, Any]) -> None:
    for text in references(reference):
        choice.gold_letters(text, options["choices"], options["several"])


def _group(reference: Any, columns: Columns, options: Mapping[str, Any]) -> None:
    if options["group"] is not None:
        references(reference)


def _code(reference: Any, columns: Columns, options: Mapping[str, Any]) -> None:
    code_tests.read_tests(reference if options["tests"] is None else columns.get(options["tests"]))


def _schema(reference: Any, columns: Columns, options: Mapping[str, Any]) -> None:
    if options["schema"] is None:
        json_form.schema_text(reference)


def _instructions(reference: Any, columns: Columns, options: Mapping[str, Any]) -> None:
    if options["checks"] is None:
        instructions.read_checks(columns)


def _gym(reference: Any, columns: Columns, options: Mapping[str, Any]) -> None:
    gym.read_entry(columns)


def _inner(reference: Any, columns: Columns, options: Mapping[str, Any]) -> None:
    problem = gold_problem(options["rule"], reference, columns, options["rule_options"] or {})
    if problem is not None:
        raise ValueError(problem)


# How to add one: a function (reference, columns, all options) that raises ValueError where the rule would, and a row here.
GOLD: dict[str, Callable[[Any, Columns, Mapping[str, Any]], None]] = {
    "choice": _choice,
    "code_tests": _code,
    "cosine_length": _inner,
    "exact": _texts,
    "f1": _texts,
    "instructions": _instructions,
    "json_schema": _schema,
    "math_answer": _math,
    "reasoning_gym": _gym,
    "regex": _group,
}
