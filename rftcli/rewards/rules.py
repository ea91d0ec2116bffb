"""Rules: reward functions with a name. The RULES table at the end lists all; each is imported on use, so that a recipe is checked without the others.

A rule is `fn(item: RuleInput, **options) -> float | None`. None abstains. An exception is an error of the sample: it has no reward from this rule.
Wrong answers are 0.0; what cannot be checked (no reference, a time limit, a helper that crashed) raises and never becomes a number.

What a rule is given is in `inputs`. Leaves out weights and sums (`table`), and user functions (`functions`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from rftcli.errors import MachineError, UsageError

READ = ("boxed", "hashes", "number")
"""math_answer: the places where an answer is looked for, in this order."""
EXTRACT = ("whole", "last_line", "answer_tag", "last_number")
"""reasoning_gym: which part of the text is the answer."""
REQUIRED = "(required)"
"""Stands for the default of an option that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table."""

    function: str
    """"module:name" of a function or of a HeavyRule class."""
    options: Mapping[str, Any]
    """Name -> default."""
    needs_reference: bool
    summary: str
    check: str | None = None
    """"module:name" of a function that says what is wrong with a full set of options that have the right types."""
    package: tuple[str, str] | None = None
    """(module to import, command that installs it) if the rule cannot do without."""

    @property
    def words(self) -> dict[str, tuple[str, str]]:
        """Option -> (what it may be, what it means), for people."""
        return {name: (TYPES[name][0], TYPES[name][2]) for name in self.options}


def check_time_limit(options: Mapping[str, Any]) -> list[str]:
    seconds = options["time_limit_seconds"]
    return [] if 0 < seconds <= 3600 else [f"option `time_limit_seconds` must lie between 0 and 3600, got {seconds}"]


def check_math(options: Mapping[str, Any]) -> list[str]:
    read = options["read"]
    good = len(read) > 0 and all(isinstance(place, str) and place in READ for place in read)
    problems = [] if good else [f"option `read` is a list of one or more of {', '.join(READ)}, got {list(read)}"]
    return problems + check_time_limit(options)


def check_gym(options: Mapping[str, Any]) -> list[str]:
    extract = options["extract"]
    problems = [] if extract in EXTRACT else [f"option `extract` is one of {', '.join(EXTRACT)}, got `{extract}`"]
    return problems + check_time_limit(options)


def check_cosine(options: Mapping[str, Any]) -> list[str]:
    problems = [] if options["max_tokens"] >= 1 else [f"option `max_tokens` must be at least 1, got {options['max_tokens']}"]
    for name in ("right", "wrong"):
        pair = options[name]
        if len(pair) != 2 or not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in pair):
            problems.append(f"option `{name}` is two numbers, of the shortest and of the longest answer, got {list(pair)}")
    if options["rule"] == "cosine_length":
        return [*problems, "option `rule` is another rule, which says what is right"]
    return problems + check_options(options["rule"], options["rule_options"] or {})


TYPES: dict[str, tuple[str, tuple[type, ...], str]] = {
    "after": ("text or null", (str, type(None)), "Only what follows its last occurrence is read, as in `</think>`; an answer without it scores 0."),
    "answer_tag": ("text or null", (str, type(None)), "Pair of tags that the answer has to stand in, behind the thinking; null asks for none."),
    "articles": ("true or false", (bool,), "Whether a, an and the count as words."),
    "buffer": ("a whole number of tokens", (int,), "Tokens below `limit` over which the penalty grows."),
    "casefold": ("true or false", (bool,), "Whether upper and lower case are the same."),
    "checks": (
        "a list or null",
        (list, tuple, type(None)),
        "Instructions of every row, as [{id: .., its arguments}]; null: the row's columns `instruction_id_list` and `kwargs`.",
    ),
    "choices": ("text", (str,), "Letters that there are to choose from, as one text."),
    "dotall": ("true or false", (bool,), "Whether `.` matches line ends too."),
    "extract": ("text", (str,), "Which part of the text is the answer: whole, last_line, answer_tag or last_number."),
    "fence": ("true or false", (bool,), "code: whether the program is the last fenced block; JSON: whether it may stand in a fence."),
    "full": ("true or false", (bool,), "Whether the pattern has to match the whole text."),
    "group": (
        "a group's name or number, or null", (str, int, type(None)), "Group of the last match that has to equal the reference; null: none has to.",
    ),
    "ignore_case": ("true or false", (bool,), "Whether upper and lower case are the same in the pattern."),
    "isolated": ("true or false", (bool,), "Whether to refuse to run where the tests cannot be cut off from network and other processes."),
    "limit": ("a whole number of tokens", (int,), "Length at which the end of the scale is reached."),
    "max_tokens": ("a whole number of tokens", (int,), "Length at which a value reaches its second number."),
    "memory_mib": ("a whole number of MiB", (int,), "Memory that the program of a test may take."),
    "most_tests": ("a whole number or null", (int, type(None)), "Only the first so many tests of a row; null: all."),
    "n": ("a whole number", (int,), "How many words an n-gram has."),
    "partial": ("true or false", (bool,), "Whether the share that is met is the score, instead of 1 for all and else 0."),
    "pattern": ("text", (str,), "Regular expression that is looked for."),
    "penalty": ("a number", (int, float), "Score of a text that is nothing but repetition."),
    "read": ("a list", (list, tuple), "Places where an answer is looked for, in this order: boxed, hashes, number."),
    "reverse": ("true or false", (bool,), "Whether longer is better: 0 up to `target`, rising to 1 at `limit`."),
    "right": ("a list of two numbers", (list, tuple), "What a right answer is worth, as [shortest, longest]."),
    "rule": ("the name of a rule", (str,), "Another rule, whose full marks say what is right."),
    "rule_options": ("a mapping or null", (dict, type(None)), "Options of the other rule."),
    "schema": ("a mapping or null", (dict, type(None)), "JSON schema of all rows; null: the row's reference is one."),
    "several": ("true or false", (bool,), "Whether several letters may be right, which have to be chosen all."),
    "strip": ("true or false", (bool,), "Whether white space at the ends does not count."),
    "tag": ("text", (str,), "Name of the pair of tags around the thinking."),
    "target": ("a whole number of tokens", (int,), "Length up to which the score stays at its beginning."),
    "task": ("text or null", (str, type(None)), "Data set of reasoning-gym whose checker is asked; null: the one that the entry names."),
    "tests": ("the name of a column or null", (str, type(None)), "Column that holds the tests; null: the reference does."),
    "time_limit_seconds": ("a number of seconds", (int, float), "A check that takes longer is an error; a test of code that does has failed."),
    "whitespace": ("true or false", (bool,), "Whether a run of white space is one space."),
    "wrong": ("a list of two numbers", (list, tuple), "What a wrong answer is worth, as [shortest, longest]."),
}
"""Option -> (what it is, its types, what it means). An option of one name is the same thing in every rule."""


def check_options(rule: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with `options` for `rule`, as sentences; empty if nothing. Imports nothing heavy.

    >>> check_options("exact", {"casefolds": True})
    ['rule `exact` has no option `casefolds`, did you mean `casefold`? allowed: after, casefold, strip, whitespace']
    """
    if rule not in RULES:
        return [f"there is no rule `{rule}`{_did_you_mean(rule, RULES)} known: {', '.join(sorted(RULES))}"]
    known = RULES[rule].options
    allowed = ", ".join(sorted(known))
    problems = [f"rule `{rule}` has no option `{name}`{_did_you_mean(name, known)} allowed: {allowed}" for name in options if name not in known]
    problems += [f"rule `{rule}` needs the option `{name}`" for name in known if known[name] is REQUIRED and name not in options]
    for name in sorted(set(options) & set(known)):
        words, types, _ = TYPES[name]
        if not isinstance(options[name], types) or (isinstance(options[name], bool) and bool not in types):
            problems.append(f"rule `{rule}`: option `{name}` must be {words}, got {options[name]!r}")
    if options.get("after") == "":
        problems.append(f"rule `{rule}`: option `after` must not be empty")
    if problems:
        return problems
    check = RULES[rule].check
    return [] if check is None else [f"rule `{rule}`: {problem}" for problem in _named(check)({**known, **options})]


def needs_reference(rule: str, options: Mapping[str, Any]) -> bool:
    """Whether every row that this rule scores must have a reference answer."""
    full = {**RULES[rule].options, **options}
    if rule == "cosine_length":
        return needs_reference(full["rule"], full["rule_options"] or {})
    if rule in BY_ROW:
        return full[BY_ROW[rule]] is None
    return RULES[rule].needs_reference or full.get("group") is not None


BY_ROW = {"code_tests": "tests", "json_schema": "schema"}
"""Rule -> the option that takes the place of the row's reference."""


def _did_you_mean(word: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), known, n=1)
    return f", did you mean `{close[0]}`?" if close else ";"


def require_package(rule: str) -> None:
    """MachineError, with the command that helps, if the rule needs a package that is not installed. Does not import it."""
    package = RULES[rule].package
    if package is not None and importlib.util.find_spec(package[0]) is None:
        raise MachineError(f"rule `{rule}` needs the package `{package[0]}`, which is not installed", hint=package[1])


def open_rule(rule: str) -> Callable[..., float | None]:
    """The callable of `rule`: its function, or a new HeavyRule, which the caller closes. UsageError for an unknown rule, MachineError as above."""
    if rule not in RULES:
        raise UsageError(check_options(rule, {})[0])
    require_package(rule)
    function = _named(RULES[rule].function)
    return function() if isinstance(function, type) else function


def _named(target: str) -> Callable[..., Any]:
    """What "module:name" stands for."""
    module, _, name = target.partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))


# How to add one: write the function, add a row, and give each new option a row in TYPES.
# A test holds every row to its function's signature.
RULES: dict[str, Rule] = {
    "choice": Rule(
        function="rftcli.rewards.choice:choice",
        options={"choices": "ABCDEFGHIJ", "several": False, "after": None},
        needs_reference=True,
        summary="1 if the letter that the answer chooses is the reference",
        check="rftcli.rewards.choice:check_choice",
    ),
    "code_tests": Rule(
        function="rftcli.rewards.code_tests:code_tests",
        options={
            "tests": None, "partial": False, "fence": True, "most_tests": None, "memory_mib": 1024, "isolated": False, "after": None,
            "time_limit_seconds": 5.0,
        },
        needs_reference=False,
        summary="1 if the Python program in the answer passes the row's tests, in a process of its own",
        check="rftcli.rewards.code_tests:check_code",
    ),
    "cosine_length": Rule(
        function="rftcli.rewards.cosine:CosineLength",
        options={"max_tokens": REQUIRED, "rule": "math_answer", "rule_options": None, "right": (1.0, 0.5), "wrong": (-1.0, -0.5)},
        needs_reference=False,
        summary="another rule says what is right, and length along a cosine what that is worth",
        check="rftcli.rewards.rules:check_cosine",
    ),
    "exact": Rule(
        function="rftcli.rewards.simple:exact",
        options={"after": None, "strip": True, "casefold": False, "whitespace": False},
        needs_reference=True,
        summary="1 if the answer equals the reference, or one of them",
    ),
    "f1": Rule(
        function="rftcli.rewards.words:f1",
        options={"after": None, "articles": False},
        needs_reference=True,
        summary="F1 of the answer's words with the reference's, as in SQuAD",
    ),
    "instructions": Rule(
        function="rftcli.rewards.instructions:instructions",
        options={"checks": None, "partial": False, "after": None},
        needs_reference=False,
        summary="1 if the answer follows the instructions that IFEval knows: word counts, keywords, language, ...",
        check="rftcli.rewards.instructions:check_instructions",
    ),
    "json_schema": Rule(
        function="rftcli.rewards.json_form:json_schema",
        options={"schema": None, "fence": True, "after": None},
        needs_reference=False,
        summary="1 if the answer is JSON that fits a schema",
        check="rftcli.rewards.json_form:check_schema",
        package=("jsonschema", "pip install 'rftcli[schema]'"),
    ),
    "length": Rule(
        function="rftcli.rewards.simple:length",
        options={"target": REQUIRED, "limit": REQUIRED, "reverse": False},
        needs_reference=False,
        summary="1 up to `target` tokens, falling to 0 at `limit`",
        check="rftcli.rewards.simple:check_length",
    ),
    "math_answer": Rule(
        function="rftcli.rewards.math_answer:MathAnswer",
        options={"after": None, "read": READ, "time_limit_seconds": 5.0},
        needs_reference=True,
        summary="1 if the last box, `####` line or number equals the reference as mathematics",
        check="rftcli.rewards.rules:check_math",
    ),
    "overlong": Rule(
        function="rftcli.rewards.simple:overlong",
        options={"limit": REQUIRED, "buffer": REQUIRED},
        needs_reference=False,
        summary="0 up to `limit` - `buffer` tokens, falling to -1 at `limit` (DAPO)",
        check="rftcli.rewards.simple:check_overlong",
    ),
    "reasoning_gym": Rule(
        function="rftcli.rewards.gym:ReasoningGym",
        options={"task": None, "extract": "whole", "after": None, "time_limit_seconds": 10.0},
        needs_reference=False,
        summary="the score of reasoning-gym's own checker for the row's task",
        check="rftcli.rewards.rules:check_gym",
        package=("reasoning_gym", "pip install reasoning-gym"),
    ),
    "regex": Rule(
        function="rftcli.rewards.simple:regex",
        options={"pattern": REQUIRED, "dotall": True, "ignore_case": False, "full": False, "group": None, "after": None, "time_limit_seconds": 5.0},
        needs_reference=False,
        summary="1 if a pattern is found, or if one of its groups equals the reference",
        check="rftcli.rewards.simple:check_regex",
    ),
    "repetition": Rule(
        function="rftcli.rewards.words:repetition",
        options={"n": 3, "penalty": -1.0},
        needs_reference=False,
        summary="a penalty for the share of n-grams of words that are repeated",
        check="rftcli.rewards.words:check_repetition",
    ),
    "think_format": Rule(
        function="rftcli.rewards.simple:think_format",
        options={"tag": "think", "answer_tag": None},
        needs_reference=False,
        summary="1 if the answer is one `<think>..</think>` followed by text that is not empty",
        check="rftcli.rewards.simple:check_tags",
    ),
}
