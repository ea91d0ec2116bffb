"""What a completion answers, by the first part that reads one."""

from __future__ import annotations

from typing import Any

import pytest

from rftcli.rewards.answers import READERS, Answers
from rftcli.rewards.rules import RULES
from rftcli.rewards.spec import PartSpec
from rftcli.types import Completion, FinishReason, Prompt, TokenTrace


def part(rule: str, weight: float = 1.0, text: str = "clean", **options: Any) -> PartSpec:
    return PartSpec(name=rule, kind="rule", target=rule, weight=weight, options=options, text=text)


def completion(text: str, label: str = "a", prefill: str = "", special: str = "<e>") -> Completion:
    prompt = Prompt(draw=0, row=0, row_id="n:0", source="n", label=label, text="?", token_ids=(1,), prefill=prefill)
    return Completion(
        prompt=prompt, sample=0, text=text, text_with_special=text + special, trace=TokenTrace(ids=(1,)), finish=FinishReason.STOP, policy_version=0
    )


@pytest.mark.parametrize(
    ("one", "text", "key"),
    [
        (part("math_answer"), r"so \boxed{\frac{2}{4}}", "1/2"),
        (part("math_answer"), "it is 0.5", "1/2"),
        (part("math_answer"), r"\boxed{50\%} or 1", "50"),
        (part("math_answer"), r"\boxed{No Solution}", "nosolution"),
        (part("math_answer", read=["boxed"]), "it is 0.5", None),
        (part("math_answer", after="</think>"), "7 </think> so 8", "8"),
        (part("math_answer", after="</think>"), "7 so 8", None),
        (part("exact", after="####"), "1 #### 12 ", "12"),
        (part("exact", casefold=True, whitespace=True), " A  b", "a b"),
        (part("exact"), "  ", None),
        (part("exact", text="keep_special"), "x", "x<e>"),
        (part("regex", pattern=r"answer: (\w+)", group=1), "answer: b, no, answer: c", "c"),
        (part("regex", pattern=r"answer: (\w+)", group=1, ignore_case=True), "Answer: b", "b"),
        (part("regex", pattern=r"answer: (\w+)", group=1), "none", None),
    ],
)
def test_keys(one: PartSpec, text: str, key: str | None) -> None:
    assert Answers({"a": [part("think_format"), one]}, score_prefill=True).read(completion(text)) == key


def test_the_prefill_belongs_to_the_answer_as_for_rewards() -> None:
    for counts, key in ((True, "12"), (False, "2")):
        assert Answers({"a": [part("exact")]}, score_prefill=counts).read(completion("2", prefill="1")) == key


def test_labels_without_a_reading_part_do_not_vote() -> None:
    labels = {"a": [part("length", target=1, limit=2)], "b": [part("regex", pattern="x")], "c": [part("exact", weight=0.0)]}
    answers = Answers(labels, score_prefill=True)
    assert [answers.votes(label) for label in "abcd"] == [False] * 4
    assert answers.read(completion("x")) is None
    served = Answers({"default": [part("exact")]}, score_prefill=True)
    assert served.votes("anything") and served.read(completion("x", label="anything")) == "x"


def test_readers_are_rules_with_an_option_after() -> None:
    assert set(READERS) <= set(RULES) and all("after" in RULES[name].options for name in READERS)
