"""Every instruction with an answer that follows it and one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from rftcli.rewards.inputs import RuleInput
from rftcli.rewards.instructions import CHECKS, instructions, read_checks

TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sun", "sea"]}, "The Sun and the sea.", "sunny sea"),
    ("keywords:forbidden_words", {"forbidden_words": ["sun"]}, "sunny", "The sun."),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "at least"}, "sun, Sun", "sun sunny"),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "less than"}, "sun", "sun sun"),
    ("keywords:letter_frequency", {"letter": "A", "let_frequency": 3, "let_relation": "at least"}, "banana", "an apple"),
    ("language:response_language", {"language": "de"}, "Das ist ein einfacher deutscher Satz.", "This is a plain English sentence."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one, two"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at most"}, "it's well-known", "one two three four"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "exactly"}, "Pi is 3.14. Yes!", "One."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}, "a\n\nthen b", "then a\n\nb"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np.s. more", "Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "maybe"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b c**", "*a* and * b *"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1 a SECTION 2 b", "SECTION 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Hope>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So: the END."', "The end. More."),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "exactly"}, "A BIG dog", "a BIG dog"),
    ("change_case:english_capital", {}, "HELLO 1!", "Hello"),
    ("change_case:english_lowercase", {}, "hello 1!", "Hello"),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
    ("startend:quotation", {}, '"all of it"', '"half" of it'),
]


def item(text: str, **columns: Any) -> RuleInput:
    return RuleInput(text=text, prompt_text="", reference=None, columns=columns, tokens=1, finish="stop", label="l", sample=0)


@pytest.mark.parametrize(("name", "given", "followed", "broken"), TABLE)
def test_each_instruction(name: str, given: dict[str, Any], followed: str, broken: str) -> None:
    for text, expected in ((followed, 1.0), (broken, 0.0)):
        assert instructions(item(text, instruction_id_list=[name], kwargs=[{**given, "num_words_of_another": None}])) == expected
        assert instructions(item(text), checks=[{"id": name.rpartition(":")[2], **given}]) == expected


def test_the_table_has_them_all() -> None:
    assert {name.rpartition(":")[2] for name, *_ in TABLE} == set(CHECKS)


def test_shares_and_empty_answers() -> None:
    checks = [{"id": "no_comma"}, {"id": "number_words", "num_words": 3}]
    assert instructions(item("a, b c"), checks=checks, partial=True) == 0.5
    assert instructions(item("a, b c"), checks=checks) == 0.0
    assert instructions(item("  "), checks=[{"id": "no_comma"}]) == 0.0
    assert instructions(item("a,</think>b"), checks=[{"id": "no_comma"}], after="</think>") == 1.0
    assert instructions(item("b"), checks=[{"id": "no_comma"}], after="</think>") == 0.0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no columns `instruction_id_list` and `kwargs`"),
        ({"instruction_id_list": ["a", "b"], "kwargs": [{}]}, "of equal length"),
        ({"instruction_id_list": [], "kwargs": []}, "the list of instructions is empty"),
        ({"instruction_id_list": ["punctuation:no_coma"], "kwargs": [None]}, "there is no instruction `punctuation:no_coma`"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": None}]}, "needs `keywords`"),
    ],
)
def test_rows_that_cannot_be_read(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_checks(columns)
