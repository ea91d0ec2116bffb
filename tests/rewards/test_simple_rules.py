"""exact, regex, think_format and length on tricky texts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.rewards.inputs import RuleInput, cut_after, references
from rftcli.rewards.simple import exact, length, regex, think_format


def item(text: str, reference: Any = None, tokens: int = 0) -> RuleInput:
    return RuleInput(text=text, prompt_text="p", reference=reference, columns={}, tokens=tokens, finish="stop", label="l", sample=0)


@pytest.mark.parametrize(
    ("text", "reference", "options", "score"),
    [
        ("4", "4", {}, 1),
        (" 4\n", "4 ", {}, 1),
        (" 4", "4", {"strip": False}, 0),
        ("Yes", "yes", {}, 0),
        ("STRASSE", "stra\u00dfe", {"casefold": True}, 1),
        ("a\n  b", "a b", {}, 0),
        ("a\r\n  b ", "a b", {"whitespace": True}, 1),
        ("b", ["a", "b"], {}, 1),
        ("c", ["a", "b"], {}, 0),
        ("4", 4, {}, 1),
        ("", "", {}, 1),
        ("think 3 </think> 4", "4", {"after": "</think>"}, 1),
        ("</think> 3 </think> 4", "4", {"after": "</think>"}, 1),
        ("4", "4", {"after": "</think>"}, 0),
    ],
)
def test_exact(text: str, reference: Any, options: dict[str, Any], score: float) -> None:
    assert exact(item(text, reference), **options) == score


@pytest.mark.parametrize("reference", [None, [], ["a", None], {"a": 1}, True])
def test_a_reference_that_is_none_or_no_text_is_an_error(reference: Any) -> None:
    with pytest.raises(ValueError, match="reference answer"):
        exact(item("a", reference))
    with pytest.raises(ValueError, match="reference answer"):
        regex(item("a", reference), pattern="(a)", group=1)


THINK_ANSWER = r"<think>.*?</think>\s*<answer>.*?</answer>"


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("<think>p\nq</think>\n<answer>5</answer>", {"full": True}, 1),
        ("<think>p\r\nq</think>\r\n<answer>5</answer>", {"full": True}, 1),
        ("<think>p</think><answer>5</answer>", {"full": True}, 1),
        ("\n\n<think>p</think>\n\n<answer>5\n</answer>\n\n", {"full": True}, 1),
        ("well <think>p</think><answer>5</answer>", {"full": True}, 0),
        ("well <think>p</think><answer>5</answer>", {}, 1),
        ("<think>p\nq</think>\n<answer>5</answer>", {"dotall": False}, 0),
        ("<THINK>p</THINK><ANSWER>5</ANSWER>", {}, 0),
        ("<THINK>p</THINK><ANSWER>5</ANSWER>", {"ignore_case": True}, 1),
    ],
)
def test_regex(text: str, options: dict[str, Any], score: float) -> None:
    assert regex(item(text), pattern=THINK_ANSWER, **options) == score


def test_a_group_is_compared_with_the_reference() -> None:
    assert regex(item("answer: 3, no, answer: 4", "4"), pattern=r"answer: (\d)", group=1) == 1  # the last match
    assert regex(item("answer: 3", ["4", "3"]), pattern=r"answer: (?P<n>\d)", group="n") == 1
    assert regex(item("answer: 3", 4), pattern=r"answer: (\d)", group=1) == 0
    assert regex(item("nothing", "4"), pattern=r"answer: (\d)", group=1) == 0
    assert regex(item("b", ""), pattern=r"(a)?b", group=1) == 0  # a group that took no part equals nothing
    assert regex(item("x</think> 7", "7"), pattern=r"(\d)", group=1, after="</think>") == 1
    assert regex(item("7", "7"), pattern=r"(\d)", group=1, after="</think>") == 0


def test_a_pattern_without_end_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(TimeoutError):
        regex(item("a" * 5000 + "!"), pattern=r"(?:a|a|b)*(?:a|a|c)*(?:a|a)*d?$(?<=x)", time_limit_seconds=0.2)


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("<think>p\nq</think>\n5", {}, 1),
        ("<think>p\r\nq</think>\r\n\r\n5", {}, 1),
        ("\n <think>p</think>5\n", {}, 1),
        ("<think></think>5", {}, 1),
        ("<think>p</think>", {}, 0),
        ("<think>p</think> \r\n", {}, 0),
        ("<think>p 5", {}, 0),
        ("p</think>5", {}, 0),
        ("5", {}, 0),
        ("", {}, 0),
        ("first <think>p</think>5", {}, 0),
        ("<think>p<think>q</think>5", {}, 0),
        ("<think>p</think>q</think>5", {}, 0),
        ("<think>p</think>5<think>", {}, 0),
        ("<THINK>p</THINK>5", {}, 0),
        ("<reason>p</reason>5", {"tag": "reason"}, 1),
        ("<think>p\nq</think>\n<answer>5</answer>", {"answer_tag": "answer"}, 1),
        ("<think>p</think><answer>5\n</answer>\r\n", {"answer_tag": "answer"}, 1),
        ("<think>p</think>5", {"answer_tag": "answer"}, 0),
        ("<think>p</think><answer> </answer>", {"answer_tag": "answer"}, 0),
        ("<think>p</think><answer>5</answer> bye", {"answer_tag": "answer"}, 0),
        ("<think>p</think>so <answer>5</answer>", {"answer_tag": "answer"}, 0),
        ("<think>p</think><answer>5</answer><answer>6</answer>", {"answer_tag": "answer"}, 0),
        ("<think><answer>4</answer></think><answer>5</answer>", {"answer_tag": "answer"}, 0),
        ("<think>p</think><answer>5", {"answer_tag": "answer"}, 0),
    ],
)
def test_think_format(text: str, options: dict[str, Any], score: float) -> None:
    assert think_format(item(text), **options) == score


@pytest.mark.parametrize(("tokens", "score"), [(0, 1.0), (10, 1.0), (15, 0.75), (20, 0.5), (30, 0.0), (99, 0.0)])
def test_length(tokens: int, score: float) -> None:
    assert length(item("", tokens=tokens), target=10, limit=30) == score
    assert length(item("", tokens=tokens), target=10, limit=30, reverse=True) == 1.0 - score


def test_helpers() -> None:
    assert cut_after("a|b|c", "|") == "c"
    assert cut_after("abc", "|") is None
    assert references([1, 2.5, "x"]) == ["1", "2.5", "x"]


@given(st.text(max_size=100), st.one_of(st.text(max_size=20), st.integers(), st.lists(st.text(max_size=5), min_size=1, max_size=3)))
@settings(max_examples=200, deadline=None)
def test_any_text_scores_between_0_and_1(text: str, reference: Any) -> None:
    scores = [
        exact(item(text, reference), casefold=True, whitespace=True),
        regex(item(text, reference), pattern=r"(.+)", group=1),
        think_format(item("<think>" + text), answer_tag="answer"),
        think_format(item(text)),
        length(item(text, tokens=len(text)), target=5, limit=50),
    ]
    assert all(isinstance(score, float) and 0.0 <= score <= 1.0 for score in scores)


@given(st.text(max_size=50))
def test_a_text_equals_itself(text: str) -> None:
    assert exact(item(text, text)) == 1.0
