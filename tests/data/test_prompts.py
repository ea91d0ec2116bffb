"""Rendering and token ids: the beginning of a sequence once, templates, prefill, and one policy for prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftcli.data.prompts import PromptBuilder
from rftcli.data.spec import ChatSpec
from rftcli.errors import UsageError

BOS = 1
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if loud %}!{% endif %}"
)
"""Without the text of the beginning-of-sequence token."""
WITH_BOS = "{{ bos_token }}" + CHATML
Make = Callable[..., Any]


def builder(tokenizer: Any, limit: int = 64, overlong: str = "refuse", **chat: Any) -> PromptBuilder:
    return PromptBuilder(tokenizer, ChatSpec(**chat), limit, overlong)


def user(text: str) -> tuple[dict, ...]:
    return ({"role": "user", "content": text},)


@pytest.mark.parametrize("kind", ["words", "bytes"])
@pytest.mark.parametrize(
    ("template", "prompt"),
    [(WITH_BOS, user("hello there")), (CHATML, user("hello there")), (None, "hello there"), (None, "<s>hello there")],
    ids=["template with", "template without", "plain text", "plain text that has it"],
)
def test_the_beginning_of_sequence_comes_exactly_once(make_tokenizer: Make, make_row: Make, kind: str, template: str | None, prompt: Any) -> None:
    tokenizer = make_tokenizer(kind=kind, front="<s>", template=template)
    made = builder(tokenizer).build(make_row(prompt), 0)
    assert made.token_ids[0] == BOS
    assert made.token_ids.count(BOS) == 1
    assert made.text.startswith("<s>") and made.text.count("<s>") == 1
    assert tuple(tokenizer(made.text, add_special_tokens=False)["input_ids"]) == made.token_ids


@pytest.mark.parametrize("prompt", [user("hello there"), "hello there"])
def test_a_tokenizer_without_one_gets_none(make_tokenizer: Make, make_row: Make, prompt: Any) -> None:
    made = builder(make_tokenizer(template=CHATML)).build(make_row(prompt), 0)
    assert BOS not in made.token_ids
    assert "<s>" not in made.text


def test_nothing_is_put_behind_a_prompt(make_tokenizer: Make, make_row: Make) -> None:
    tokenizer = make_tokenizer(front="<s>", behind="</s>")
    assert tokenizer("hello there")["input_ids"] == [1, 13, 14, 2]
    made = builder(tokenizer).build(make_row("hello there"), 0)
    assert made.token_ids == (1, 13, 14)
    assert made.text == "<s>hello there"


def test_a_front_of_two_tokens(make_tokenizer: Make, make_row: Make) -> None:
    made = builder(make_tokenizer(front="<|system|> <s>")).build(make_row("hello there"), 0)
    assert made.token_ids == (4, 1, 13, 14)


@pytest.mark.parametrize(("text", "ids"), [("<s>", (1,)), ("</s>", (1, 2)), ("</s> hello", (1, 2, 13)), ("there", (1, 14))])
def test_special_tokens_in_a_text_do_not_confuse_it(make_tokenizer: Make, make_row: Make, text: str, ids: tuple[int, ...]) -> None:
    assert builder(make_tokenizer(front="<s>", behind="</s>")).build(make_row(text), 0).token_ids == ids


def test_a_plain_prompt_is_tokenised_as_it_is(make_tokenizer: Make, make_row: Make) -> None:
    made = builder(make_tokenizer(template=CHATML)).build(make_row("hello there"), 0)
    assert (made.token_ids, made.text, made.messages) == ((13, 14), "hello there", ())


def test_a_prompt_carries_its_row_and_its_draw(make_tokenizer: Make, make_row: Make) -> None:
    row = make_row("hello", 3, label="chat", reference=["x", "y"])
    made = builder(make_tokenizer()).build(row, 7)
    assert (made.draw, made.row, made.row_id, made.source, made.label) == (7, 3, "train:3", "train", "chat")
    assert (made.reference, made.columns, made.prefill) == (["x", "y"], {"prompt": "hello", "number": 3}, "")


HISTORY = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
)


def test_all_turns_of_the_history_are_rendered(make_tokenizer: Make, make_row: Make) -> None:
    made = builder(make_tokenizer(template=CHATML)).build(make_row(HISTORY), 0)
    assert made.text == "<|user|>one</s><|assistant|>two</s><|user|>three</s><|assistant|>"
    assert made.token_ids == (3, 9, 2, 5, 10, 2, 3, 11, 2, 5)
    assert made.messages == HISTORY


def test_system_goes_before_rows_without_one(make_tokenizer: Make, make_row: Make) -> None:
    make = builder(make_tokenizer(template=CHATML), system="rules")
    assert make.build(make_row(HISTORY), 0).text.startswith("<|system|>rules</s><|user|>one")
    own = ({"role": "system", "content": "a"}, *HISTORY)
    assert make.build(make_row(own), 0).text.startswith("<|system|>a</s><|user|>one")
    assert make.build(make_row(HISTORY), 0).messages[0] == {"role": "system", "content": "rules"}
    with pytest.raises(UsageError, match=r"train.jsonl:1: the prompt is plain text, which has no place for `models.policy.chat.system`"):
        make.build(make_row("hello"), 0)


def test_a_template_that_loses_the_system_prompt_is_refused(make_tokenizer: Make, make_row: Make) -> None:
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UsageError, match="leaves the system prompt out"):
        builder(make_tokenizer(template=template), system="rules").build(make_row(HISTORY), 0)


def test_own_template_goes_before_the_tokenizers(make_tokenizer: Make, make_row: Make, tmp_path: Path) -> None:
    own = "{% for m in messages %}{{ m.content }} {% endfor %}so"
    tokenizer = make_tokenizer(template=CHATML)
    assert builder(tokenizer, template=own).build(make_row(HISTORY), 0).text == "one two three so"
    (tmp_path / "own.jinja").write_text(own)
    from_file = PromptBuilder(tokenizer, ChatSpec(template="own.jinja"), 64, "refuse", (tmp_path,))
    assert from_file.build(make_row(HISTORY), 0).text == "one two three so"
    with pytest.raises(UsageError, match="neither Jinja text nor a file"):
        builder(tokenizer, template="absent.jinja")


def test_messages_need_a_template(make_tokenizer: Make, make_row: Make) -> None:
    with pytest.raises(UsageError, match=r"train.jsonl:1: the prompt is a list of messages, and the tokenizer has no chat template"):
        builder(make_tokenizer()).build(make_row(HISTORY), 0)


def test_options_reach_the_template(make_tokenizer: Make, make_row: Make) -> None:
    tokenizer = make_tokenizer(template=CHATML)
    assert builder(tokenizer, options={"loud": True}).build(make_row(user("one")), 0).text == "<|user|>one</s><|assistant|>!"
    assert builder(tokenizer, options={"loud": False}).build(make_row(user("one")), 0).text == "<|user|>one</s><|assistant|>"


def test_options_of_a_row_come_from_its_columns(make_tokenizer: Make, make_row: Make) -> None:
    make = builder(make_tokenizer(template=CHATML), options={"loud": {"column": "shout"}})
    assert make.build(make_row(user("one"), columns={"shout": True}), 0).text == "<|user|>one</s><|assistant|>!"
    assert make.build(make_row(user("one"), columns={"shout": False}), 0).text == "<|user|>one</s><|assistant|>"
    with pytest.raises(UsageError, match=r"there is no column `shout`, which `models.policy.chat.options.loud` asks for"):
        make.build(make_row(user("one")), 0)


@pytest.mark.parametrize(
    ("options", "template", "problem"),
    [
        ({"lowd": True}, CHATML, "the chat template never reads `lowd`"),
        ({"tokenize": True}, CHATML, "cannot hold `tokenize`"),
        ({"add_generation_prompt": False}, CHATML, "cannot hold `add_generation_prompt`"),
        ({"loud": True}, None, "there is no chat template"),
    ],
)
def test_options_that_would_do_nothing_or_harm(make_tokenizer: Make, options: dict, template: str | None, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        builder(make_tokenizer(template=template), options=options)


@pytest.mark.parametrize(
    ("template", "problem"),
    [("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"), ("{% for %}", "TemplateSyntaxError")],
)
def test_a_failing_template_names_the_row(make_tokenizer: Make, make_row: Make, template: str, problem: str) -> None:
    with pytest.raises(UsageError, match=r"data set `train`: train.jsonl:1: the chat template fails: " + problem):
        builder(make_tokenizer(template=template)).build(make_row(HISTORY), 0)


@pytest.mark.parametrize(
    ("prompt", "text"), [(user("one"), "<s><|user|>one</s><|assistant|>so w"), ("one ", "<s>one so w")], ids=["messages", "plain"]
)
def test_prefill_ends_the_prompt(make_tokenizer: Make, make_row: Make, prompt: Any, text: str) -> None:
    made = builder(make_tokenizer(kind="bytes", front="<s>", template=CHATML), prefill="so w").build(make_row(prompt), 0)
    assert (made.text, made.prefill) == (text, "so w")
    assert made.text.endswith(made.prefill)


def test_a_prompt_without_tokens_is_refused(make_tokenizer: Make, make_row: Make) -> None:
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        builder(make_tokenizer()).build(make_row("  "), 0)


def test_as_long_as_allowed_is_not_too_long(make_tokenizer: Make, make_row: Make) -> None:
    row = make_row(" ".join(["a"] * 15))
    for overlong in ("refuse", "drop", "cut_left", "cut_right"):
        make = builder(make_tokenizer(front="<s>"), 16, overlong)
        assert make.num_tokens(row) == 16
        assert make.build(row, 0).token_ids == (1, *[6] * 15)


@pytest.mark.parametrize("overlong", ["refuse", "drop"])
def test_too_long_is_refused_with_row_needed_and_allowed(make_tokenizer: Make, make_row: Make, overlong: str) -> None:
    with pytest.raises(UsageError) as caught:
        builder(make_tokenizer(), 16, overlong).build(make_row(" ".join(["a"] * 40), 4), 0)
    assert caught.value.message == "data set `train`: train.jsonl:5: the prompt needs 40 tokens, `rollout.max_prompt_tokens` allows 16"


@pytest.mark.parametrize(
    ("overlong", "front", "ids"),
    [
        ("cut_left", "", (7, 8, 9, 10)),
        ("cut_left", "<s>", (1, 8, 9, 10)),
        ("cut_right", "", (6, 7, 8, 9)),
        ("cut_right", "<s>", (1, 6, 7, 8)),
    ],
)
def test_cutting_plain_text_keeps_the_front(make_tokenizer: Make, make_row: Make, overlong: str, front: str, ids: tuple[int, ...]) -> None:
    tokenizer = make_tokenizer(front=front)
    made = builder(tokenizer, 4, overlong).build(make_row("a b c one two"), 0)
    assert made.token_ids == ids
    assert made.text == tokenizer.decode(list(ids))


@pytest.mark.parametrize(
    ("overlong", "middle"),
    [("cut_left", (7, 8, 9, 2)), ("cut_right", (3, 6, 7, 8))],
)
@pytest.mark.parametrize("template", [WITH_BOS, CHATML])
def test_cutting_messages_keeps_the_opening_of_the_answer(
    make_tokenizer: Make, make_row: Make, overlong: str, middle: tuple[int, ...], template: str
) -> None:
    tokenizer = make_tokenizer(front="<s>", template=template)
    assert builder(tokenizer, prefill="so w").build(make_row(user("a b c one")), 0).token_ids == (1, 3, 6, 7, 8, 9, 2, 5, 15, 16)
    made = builder(tokenizer, 8, overlong, prefill="so w").build(make_row(user("a b c one")), 0)
    assert made.token_ids == (1, *middle, 5, 15, 16)
    assert made.prefill == "so w"


def test_a_front_written_by_the_template_alone_survives_a_cut(make_tokenizer: Make, make_row: Make) -> None:
    tokenizer = make_tokenizer(template=WITH_BOS)
    tokenizer.bos_token = "<s>"
    made = builder(tokenizer, 4, "cut_left").build(make_row(user("a b c")), 0)
    assert made.token_ids == (1, 8, 2, 5)


def test_a_limit_below_the_opening_is_refused(make_tokenizer: Make, make_row: Make) -> None:
    with pytest.raises(UsageError, match="leaves nothing of the prompt: the opening of the answer alone is 3 tokens"):
        builder(make_tokenizer(template=CHATML), 3, "cut_left", prefill="so w").build(make_row(user("a b c")), 0)
