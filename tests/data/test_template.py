"""Prompts made of a text with slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftcli.data.rows import read_rows
from rftcli.data.spec import Columns, DataSpec
from rftcli.data.template import Template
from rftcli.errors import UsageError


def prompt(write_jsonl: Any, row: dict[str, Any], template: str, **changes: Any) -> Any:
    return read_rows(DataSpec(name="s", path=str(write_jsonl(row)), template=template, **changes))[0].prompt


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {question}\nA:", "Q: 1+1?\nA:"),
        ("{}!", "the prompt!"),
        ("{prompt} {extra.n} {flat.name}", "the prompt 3 dotted"),
        ("{{{question}}} {{}}", "{1+1?} {}"),
        ("{question}{question}", "1+1?1+1?"),
        (r"\boxed{{}} {question}", r"\boxed{} 1+1?"),
    ],
)
def test_slots(write_jsonl: Any, template: str, text: str) -> None:
    row = {"prompt": "the prompt", "question": "1+1?", "extra": {"n": 3}, "flat.name": "dotted"}
    assert prompt(write_jsonl, row, template) == text


def test_a_value_with_braces_is_not_read_again(write_jsonl: Any) -> None:
    assert prompt(write_jsonl, {"question": "{answer} {}"}, "Q: {question}") == "Q: {answer} {}"


def test_the_empty_slot_is_the_named_prompt_column(write_jsonl: Any) -> None:
    assert prompt(write_jsonl, {"question": "1?"}, "Q: {}", columns=Columns(prompt="question")) == "Q: 1?"


def test_a_template_may_become_a_users_message(write_jsonl: Any) -> None:
    assert prompt(write_jsonl, {"question": "1?"}, "Q: {question}", as_chat=True) == ({"role": "user", "content": "Q: 1?"},)


@pytest.mark.parametrize("template", ["no slot", "{{}}", "{", "}", "{a", "{a!r}", "{a:>3}", "{a[0]}", "{0}", "{ a }", ""])
def test_what_is_no_template(template: str) -> None:
    with pytest.raises(UsageError, match="template"):
        Template.parse(template)
    with pytest.raises(UsageError, match=r"data set `s`: .*template"):
        read_rows(DataSpec(name="s", path="/nowhere.jsonl", template=template))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"quesion": "1?"}, "no column `question`; it has: quesion"),
        ({"question": None}, "column `question` is null"),
        ({"question": ["1?"]}, "column `question` holds a list, and a slot of `template` takes text or a number"),
        ({"question": True}, "column `question` holds true or false"),
    ],
)
def test_rows_that_do_not_fill_it(write_jsonl: Any, row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        prompt(write_jsonl, row, "{question}")
    assert f"{tmp_path}/train.jsonl:1: {problem}" in caught.value.message
