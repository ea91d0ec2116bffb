"""Rows that carry their answer: where it is found, and what is learned of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftcli.data.prompts import PromptBuilder
from rftcli.data.rows import read_rows
from rftcli.data.spec import ChatSpec, Columns, DataSpec
from rftcli.data.supervised import encode_answers
from rftcli.errors import UsageError

Make = Callable[..., Any]
END = 2
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def answers(write: Callable[..., Path], *rows: Any, **spec: Any) -> list[tuple[Any, Any]]:
    return [(row.prompt, row.reference) for row in read_rows(DataSpec(name="s", path=str(write(*rows)), answers=True, **spec))]


def test_where_answers_stand(write_jsonl: Callable[..., Path]) -> None:
    user, said = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
    assert answers(write_jsonl, {"prompt": "a", "completion": "b"}, {"prompt": "a", "answer": "c"}, {"prompt": "a", "reference": "so"}) == [
        ("a", "b"), ("a", "c"), ("a", "so"),
    ]  # fmt: skip
    assert answers(write_jsonl, {"prompt": [user, said, user, said], "answer": "not this"}) == [((user, said, user), "two")]
    assert answers(write_jsonl, {"q": "a", "deep": {"text": "b"}}, columns=Columns(prompt="q", reference="deep.text")) == [("a", "b")]
    assert answers(write_jsonl, {"prompt": "a", "completion": "b"}, as_chat=True, system="rules") == [
        (({"role": "system", "content": "rules"}, {"role": "user", "content": "a"}), "b")
    ]
    with pytest.raises(UsageError, match="there is no answer to learn"):
        answers(write_jsonl, {"prompt": "a"})
    with pytest.raises(UsageError, match="assistant's"):
        read_rows(DataSpec(name="s", path=str(write_jsonl({"prompt": [user, said]}))))  # a prompt that is answered is still refused


def encode(make_tokenizer: Make, rows: list[Any], *, limit: int = 50, **tokenizer: Any) -> Any:
    made = make_tokenizer(**tokenizer)
    return made, encode_answers(rows, PromptBuilder(made, ChatSpec(), 64, "refuse"), made, (END,), limit)


def test_plain_answers_end_with_the_end_token(make_tokenizer: Make, make_row: Make) -> None:
    tokenizer, (first, second) = encode(make_tokenizer, [make_row("one two", reference="three so"), make_row("a", reference="b </s>")], front="<s>")
    assert tokenizer.decode(first.token_ids) == "<s> one two three so </s>" and first.prompt_tokens == 3
    assert tokenizer.decode(second.token_ids) == "<s> a b </s>" and not second.cut


def test_chat_answers_end_where_the_turn_ends(make_tokenizer: Make, make_row: Make) -> None:
    """What the template writes after the end of the turn, here a line break, is nobody's to learn; no part of the prompt comes twice."""
    row = make_row(({"role": "user", "content": "hi"},), reference="yes")
    tokenizer, (found,) = encode(make_tokenizer, [row], kind="bytes", template=CHATML)
    assert tokenizer.decode(found.token_ids, clean_up_tokenization_spaces=False) == "<|user|>hi</s>\n<|assistant|>yes</s>"
    assert tokenizer.decode(found.token_ids[found.prompt_tokens :]) == "yes</s>"


def test_a_template_that_writes_prompts_otherwise_with_an_answer(make_tokenizer: Make, make_row: Make) -> None:
    thinking = CHATML.replace("<|assistant|>{% endif %}", "<|assistant|><s>{% endif %}")
    row = make_row(({"role": "user", "content": "hi"},), reference="yes")
    tokenizer, (found,) = encode(make_tokenizer, [row], kind="bytes", template=thinking)
    assert tokenizer.decode(found.token_ids[found.prompt_tokens :]) == "yes</s>"


def test_long_answers_are_cut_and_counted(make_tokenizer: Make, make_row: Make) -> None:
    tokenizer, (found,) = encode(make_tokenizer, [make_row("a", reference="one two three")], limit=2)
    assert tokenizer.decode(found.token_ids) == "a one two" and found.cut


@pytest.mark.parametrize("answer", [None, "", 7, ["a"]])
def test_an_answer_is_text(make_tokenizer: Make, make_row: Make, answer: Any) -> None:
    with pytest.raises(UsageError, match=r"train\.jsonl:1: the answer must be text"):
        encode(make_tokenizer, [make_row("a", reference=answer)])
