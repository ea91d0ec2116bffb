"""The table of rules: its rows fit their functions, and wrong options are found before anything runs."""

import doctest
import importlib
import inspect
import subprocess
import sys

import pytest

from rftcli.errors import MachineError, UsageError
from rftcli.rewards.inputs import HeavyRule
from rftcli.rewards.rules import REQUIRED, RULES, TYPES, check_options, needs_reference, open_rule


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_row_states_the_options_and_defaults_of_its_function(name: str) -> None:
    function = open_rule(name)
    called = type(function).__call__ if isinstance(function, HeavyRule) else function
    parameters = {key: value for key, value in inspect.signature(called).parameters.items() if value.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {key: REQUIRED if value.default is inspect.Parameter.empty else value.default for key, value in parameters.items()} == dict(
        RULES[name].options
    )
    assert set(parameters) <= set(TYPES)
    if isinstance(function, HeavyRule):
        function.close()


@pytest.mark.parametrize("name", sorted(RULES))
def test_defaults_pass_their_own_check(name: str) -> None:
    examples = {"pattern": "a", "target": 1, "limit": 2, "buffer": 1, "max_tokens": 9}
    options = {key: examples[key] if default is REQUIRED else default for key, default in RULES[name].options.items()}
    assert check_options(name, options) == []


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("exakt", {}, ["there is no rule `exakt`, did you mean `exact`? known: " + ", ".join(sorted(RULES))]),
        ("exact", {"casfold": True}, ["rule `exact` has no option `casfold`, did you mean `casefold`? allowed: after, casefold, strip, whitespace"]),
        ("exact", {"casefold": 1}, ["rule `exact`: option `casefold` must be true or false, got 1"]),
        ("exact", {"after": 3}, ["rule `exact`: option `after` must be text or null, got 3"]),
        ("exact", {"after": ""}, ["rule `exact`: option `after` must not be empty"]),
        ("regex", {}, ["rule `regex` needs the option `pattern`"]),
        ("regex", {"pattern": "a", "group": 1}, ["rule `regex`: option `group`: the pattern has no group `1`, its number of groups is 0"]),
        (
            "regex",
            {"pattern": "(?P<n>a)", "group": "m"},
            ["rule `regex`: option `group`: the pattern has no group `m`, its number of groups is 1 (named n)"],
        ),
        ("length", {"target": 5}, ["rule `length` needs the option `limit`"]),
        ("length", {"target": 5, "limit": 5}, ["rule `length`: options `target` and `limit` must satisfy 0 <= target < limit, got 5 and 5"]),
        ("length", {"target": True, "limit": 5}, ["rule `length`: option `target` must be a whole number of tokens, got True"]),
        ("think_format", {"tag": "<think>"}, ["rule `think_format`: option `tag` is the bare name of a tag, such as `think`, got `<think>`"]),
        ("think_format", {"answer_tag": "think"}, ["rule `think_format`: options `tag` and `answer_tag` must differ"]),
        ("math_answer", {"read": []}, ["rule `math_answer`: option `read` is a list of one or more of boxed, hashes, number, got []"]),
        ("math_answer", {"read": ["box"]}, ["rule `math_answer`: option `read` is a list of one or more of boxed, hashes, number, got ['box']"]),
        ("math_answer", {"time_limit_seconds": 0}, ["rule `math_answer`: option `time_limit_seconds` must lie between 0 and 3600, got 0"]),
        (
            "reasoning_gym",
            {"extract": "first"},
            ["rule `reasoning_gym`: option `extract` is one of whole, last_line, answer_tag, last_number, got `first`"],
        ),
    ],
)
def test_wrong_options_are_said(rule: str, options: dict[str, object], expected: list[str]) -> None:
    assert check_options(rule, options) == expected


def test_a_pattern_that_does_not_compile_is_said() -> None:
    (message,) = check_options("regex", {"pattern": "(a"})
    assert message.startswith("rule `regex`: option `pattern` is not a regular expression: missing )")


def test_several_problems_come_at_once() -> None:
    assert len(check_options("regex", {"patern": "a", "full": "yes"})) == 3


def test_who_needs_a_reference() -> None:
    assert [name for name in sorted(RULES) if needs_reference(name, {})] == [
        "choice", "code_tests", "cosine_length", "exact", "f1", "json_schema", "math_answer",
    ]  # fmt: skip
    assert not needs_reference("code_tests", {"tests": "asserts"}) and not needs_reference("json_schema", {"schema": {}})
    assert not needs_reference("cosine_length", {"rule": "think_format"})
    assert needs_reference("regex", {"pattern": "(a)", "group": 1})


def test_opening_what_is_not_there() -> None:
    with pytest.raises(UsageError, match="there is no rule `nothing`"):
        open_rule("nothing")


def test_a_missing_package_is_a_matter_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])  # nothing is installed there
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    with pytest.raises(MachineError, match="needs the package `reasoning_gym`") as caught:
        open_rule("reasoning_gym")
    assert caught.value.hint == "pip install reasoning-gym"


def test_the_room_is_light() -> None:
    heavy = ("torch", "transformers", "numpy", "sympy", "math_verify", "reasoning_gym")
    rooms = "rftcli.rewards.table, rftcli.rewards.rules, rftcli.rewards.math_answer, rftcli.rewards.gym, rftcli.rewards.failures"
    code = f"import sys, {rooms}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["find_answer", "mathtext", "inputs", "rules", "math_answer", "gym", "spec", "combine", "functions"])
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"rftcli.rewards.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
