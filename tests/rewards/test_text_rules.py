"""Tables of tricky strings: choice, f1, repetition, cosine_length, overlong, json_schema, and the gold that they cannot read."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.rewards.choice import chosen_letters
from rftcli.rewards.cosine import CosineLength, cosine
from rftcli.rewards.gold import GOLD, gold_problem
from rftcli.rewards.inputs import RuleInput
from rftcli.rewards.rules import RULES, check_options, open_rule
from rftcli.rewards.words import words


def item(text: str, reference: Any = None, *, tokens: int = 1, **columns: Any) -> RuleInput:
    return RuleInput(text=text, prompt_text="", reference=reference, columns=columns, tokens=tokens, finish="stop", label="l", sample=0)


def score(name: str, text: str, reference: Any = None, /, *, tokens: int = 1, columns: dict[str, Any] | None = None, **options: Any) -> float | None:
    assert check_options(name, options) == []
    return open_rule(name)(item(text, reference, tokens=tokens, **(columns or {})), **options)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        (r"\boxed{B}", "B"), (r"\boxed{\text{c}}", "C"), (r"$\boxed{\textbf{(E)}\ 12}$", "E"), (r"\boxed{A} no, \boxed{D}", "D"),
        (r"\boxed{A or B}", None), (r"\boxed{}, the answer is C", "C"), (r"\boxed{12}. So B", None), ("<answer>(D)</answer>", "D"),
        ("<answer>A</answer><answer> B </answer>", "B"), ("<answer>none</answer> The answer is B", None), ("The answer is (c).", "C"),
        ("The answer is **B**.", "B"), ("The final answer is $B$.", "B"), ("The correct option is D", "D"), ("Answer: B", "B"), ("answer:\nB", "B"),
        ("ANSWER：Ｂ", None), ("答案是B", "B"), ("答案：C。", "C"), ("So I choose A.", "A"), ("The answer is A because it rains", "A"),
        ("The answer is a matter of taste", None), ("The answer is B or C", None), ("The answer is not B", None), ("The answer is Berlin", None),
        ("The answer is A. No, wait: the answer is B.", "B"), ("Option A is bad.\nB", "B"), ("B", "B"), ("b", "B"), ("(B)", "B"), ("B) Paris", "B"),
        ("**B.** Paris", "B"), ("B Paris", None), ("(A) or (B)", None), ("A or B", None), ("AB", None), ("I do not know", None), ("", None),
        ("K", None), ("The answer is K", None), ("\n\nB\n\n", "B"), ("B\n\nThat is all.", None), ("answer: B) Paris or London", "B"),
    ],
)  # fmt: skip
def test_which_letter_an_answer_chooses(text: str, chosen: str | None) -> None:
    found = chosen_letters(text, "ABCDE", False)
    assert found == (None if chosen is None else frozenset(chosen))


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        (r"\boxed{A, C}", "AC", 1), (r"\boxed{CA}", "A, C", 1), (r"\boxed{A and C}", "AC", 1), ("Answer: A, C", "A C", 1), (r"\boxed{A}", "AC", 0),
        (r"\boxed{A, C, D}", "AC", 0), ("the answers are A and D", "AD", 1), (r"\boxed{A, 7}", "A", 0), (r"\boxed{A}", "A", 1),
    ],
)  # fmt: skip
def test_several_choices(text: str, gold: str, expected: float) -> None:
    assert score("choice", text, gold, choices="ABCD", several=True) == expected


def test_choice_takes_any_of_several_references_and_a_delimiter() -> None:
    assert score("choice", "B", ["A", "(b)"]) == 1 and score("choice", "C", ["A", "B"]) == 0
    assert score("choice", "A</think>B", "B", after="</think>") == 1 and score("choice", "B", "B", after="</think>") == 0
    with pytest.raises(ValueError, match=r"the reference 'Paris' is no choice of A, B"):
        score("choice", "A", "Paris")


@pytest.mark.parametrize(
    ("text", "gold", "expected", "options"),
    [
        ("the cat sat", "a cat sat down", 0.8, {}), ("The Cat, sat!", "cat sat", 1.0, {}), ("", "cat", 0.0, {}), ("...", "!", 1.0, {}),
        ("cat cat", "cat", 2 / 3, {}), ("dog", "cat", 0.0, {}), ("the", "a", 1.0, {}), ("the", "a", 0.0, {"articles": True}),
        ("cafe\u0301", "café", 1.0, {}), ("我爱你", "我爱他", 2 / 3, {}), ("１２", "12", 1.0, {}), ("well-known", "well known", 0.0, {}),
        ("x #### cat", "cat", 1.0, {"after": "####"}), ("cat", "cat", 0.0, {"after": "####"}), ("sat", ["dog", "cat sat"], 2 / 3, {}),
        ("4", 4, 1.0, {}),
    ],
)  # fmt: skip
def test_f1(text: str, gold: Any, expected: float, options: dict[str, Any]) -> None:
    assert score("f1", text, gold, **options) == pytest.approx(expected)


@given(st.lists(st.sampled_from(["ab", "cd", "ef"]), max_size=6), st.lists(st.sampled_from(["ab", "cd", "ef"]), max_size=6))
def test_f1_is_symmetric_and_at_most_one(one: list[str], other: list[str]) -> None:
    there, back = score("f1", " ".join(one), " ".join(other)), score("f1", " ".join(other), " ".join(one))
    assert there == back and 0.0 <= there <= 1.0
    assert (there == 1.0) == (sorted(one) == sorted(other))


@pytest.mark.parametrize(
    ("text", "expected", "options"),
    [
        ("a b c a b c a b c", -(1 - 3 / 7), {}), ("a b a b a b", -0.5 * 3 / 5, {"n": 2, "penalty": -0.5}), ("a b c d e", 0.0, {}), ("a b", 0.0, {}),
        ("", 0.0, {}), ("No. No, no! NO", -3 / 4, {"n": 1}), ("好好好好", -1 / 2, {}), ("a\na\na\na", -1 / 2, {}),
    ],
)  # fmt: skip
def test_repetition(text: str, expected: float, options: dict[str, Any]) -> None:
    assert score("repetition", text, **options) == pytest.approx(expected)


def test_words() -> None:
    assert words("It's x_1: C++ e-mail, 3.5 ไทย") == ["It's", "x_1", "C", "e-mail", "3", "5", *words("ไทย")]
    assert words("") == words(" -- !? ") == []


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [("4", 0, 1.0), ("4", 50, 0.75), ("4", 100, 0.5), ("4", 999, 0.5), ("5", 0, -1.0), ("5", 50, -0.75), ("5", 100, -0.5),
     ("4", 25, 0.5 + 0.25 * (1 + math.cos(math.pi / 4)))],
)  # fmt: skip
def test_cosine_by_length(text: str, tokens: int, expected: float) -> None:
    assert score("cosine_length", text, "4", tokens=tokens, max_tokens=100, rule="exact") == pytest.approx(expected)


def test_cosine_length_passes_on_what_the_inner_rule_says() -> None:
    rule = CosineLength()
    with pytest.raises(ValueError, match="no reference"):
        rule(item("4"), max_tokens=9, rule="exact")
    assert rule(item("B", "B"), max_tokens=9, rule="choice", rule_options={"choices": "AB"}, right=(2, 1)) == pytest.approx(cosine(1 / 9, 2, 1))
    assert rule(item(r"\boxed{\frac{1}{2}}", "0.5"), max_tokens=1) == 0.5
    rule.close()


@pytest.mark.parametrize(
    ("rule", "options", "problem"),
    [
        ("choice", {"choices": "abc"}, "option `choices` is two or more different capital letters, such as ABCD, got `abc`"),
        ("choice", {"choices": "AAB"}, "option `choices` is two or more different capital letters, such as ABCD, got `AAB`"),
        ("repetition", {"n": 0}, "option `n` must be at least 1, got 0"),
        ("repetition", {"penalty": 1}, "option `penalty` must be at most 0, got 1"),
        ("overlong", {"limit": 5, "buffer": 6}, "options `buffer` and `limit` must satisfy 0 < buffer <= limit, got 6 and 5"),
        ("cosine_length", {"max_tokens": 9, "rule": "cosine_length"}, "option `rule` is another rule, which says what is right"),
        ("cosine_length", {"max_tokens": 9, "right": [1]}, "option `right` is two numbers, of the shortest and of the longest answer, got [1]"),
        ("cosine_length", {"max_tokens": 0}, "option `max_tokens` must be at least 1, got 0"),
        (
            "json_schema", {"schema": {"type": "obj"}},
            "option `schema` is no JSON schema: 'obj' is not valid under any of the given schemas at $.type",
        ),
        ("instructions", {"checks": [{"num": 1}]}, "option `checks` is a list of mappings with an `id`"),
        ("instructions", {"checks": [{"id": "number_words"}]}, "option `checks`: the instruction `number_words` needs `num_words`"),
        (
            "instructions",
            {"checks": [{"id": "number_words", "num_words": 3, "relation": "more"}]},
            "option `checks`: the instruction `number_words`: `relation` is one of less than, at least, at most, exactly, got 'more'",
        ),
        ("code_tests", {"memory_mib": 1}, "option `memory_mib` must be at least 64, got 1"),
        ("code_tests", {"most_tests": 0}, "option `most_tests` must be at least 1"),
        ("code_tests", {"time_limit_seconds": 0.0}, "option `time_limit_seconds` must lie between 0 and 3600, got 0.0"),
    ],
)
def test_options_that_make_no_sense(rule: str, options: dict[str, Any], problem: str) -> None:
    assert check_options(rule, options) == [f"rule `{rule}`: {problem}"]


def test_an_inner_rule_is_checked_too() -> None:
    (problem,) = check_options("cosine_length", {"max_tokens": 9, "rule": "exakt"})
    assert "there is no rule `exakt`, did you mean `exact`?" in problem
    (problem,) = check_options("cosine_length", {"max_tokens": 9, "rule": "exact", "rule_options": {"strp": True}})
    assert "rule `exact` has no option `strp`, did you mean `strip`?" in problem


@pytest.mark.parametrize(("tokens", "expected"), [(80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (500, -1.0)])
def test_overlong(tokens: int, expected: float) -> None:
    assert score("overlong", "", tokens=tokens, limit=100, buffer=20) == pytest.approx(expected)


PERSON = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"age": 3}', 1), (' \n{"age": 3}\n', 1), ('```json\n{"age": 3}\n```', 1), ('```\n{"age": 3}\n```', 1), ('{"age": "3"}', 0),
        ('{"age": -1}', 0), ("{}", 0), ('{"age": 3, "x": 1}', 0), ('so: {"age": 3}', 0), ('{"age": 3,}', 0), ("{'age': 3}", 0), ('{"age": NaN}', 0),
        ("", 0), ("[" * 100_000, 0), ('{"age": 1e3}', 1), ('{"age": 3} // done', 0), ('```json\n{"age": 3}\n``` and more', 0), ('{"age": true}', 0),
    ],
)  # fmt: skip
def test_json_that_fits_a_schema(text: str, expected: float) -> None:
    assert score("json_schema", text, schema=PERSON) == expected


def test_json_schemas_of_rows() -> None:
    for reference in ('{"type": "array"}', {"type": "array"}):
        assert (score("json_schema", "[1]", reference), score("json_schema", "1", reference)) == (1, 0)
    assert score("json_schema", "```json\n1\n```", {}, fence=False) == 0
    assert score("json_schema", "sure:JSON 1", True, after="JSON") == 1
    with pytest.raises(ValueError, match="no JSON schema"):
        score("json_schema", "[1]", "array")


def test_a_schema_is_never_fetched() -> None:
    with pytest.raises(Exception, match=r"http://127\.0\.0\.1:9/x"):
        score("json_schema", "1", schema={"$ref": "http://127.0.0.1:9/x"})


def test_every_rule_with_gold_has_a_reader() -> None:
    assert {name for name, rule in RULES.items() if rule.needs_reference} <= set(GOLD) <= set(RULES)


@pytest.mark.parametrize(
    ("rule", "reference", "options", "problem"),
    [
        ("exact", None, {}, "the row has no reference answer"),
        ("f1", True, {}, "a reference answer must be text or a number, got bool"),
        ("math_answer", "...", {}, "the reference answer '...' holds nothing to compare with"),
        ("choice", ["A", "Z"], {"choices": "ABC"}, "the reference 'Z' is no choice of A, B, C"),
        ("code_tests", {"inputs": ["1"], "outputs": []}, {}, "tests have 1 inputs and 0 outputs"),
        (
            "code_tests", {"inputs": [1], "outputs": [2]}, {},
            "what is written to standard input and what is printed are texts; functions need `fn_name`",
        ),
        ("reasoning_gym", None, {}, "the row has no column `entry` with question, answer and metadata"),
        ("cosine_length", "Z", {"max_tokens": 1, "rule": "choice"}, "the reference 'Z' is no choice of A, B, C, D, E, F, G, H, I, J"),
        ("exact", "4", {}, None), ("regex", None, {"pattern": "a"}, None), ("length", None, {}, None), ("json_schema", None, {"schema": {}}, None),
    ],
)  # fmt: skip
def test_gold_that_cannot_be_read(rule: str, reference: Any, options: dict[str, Any], problem: str | None) -> None:
    assert gold_problem(rule, reference, {}, options) == problem
