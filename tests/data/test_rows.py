"""Columns: what is found, what is missing, and that a missing name is told with its row and the names that are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftcli.codec import from_data, to_data
from rftcli.data.rows import Row, fingerprint, read_rows
from rftcli.data.spec import Columns, DataSpec
from rftcli.errors import UsageError

Write = Callable[..., Path]


def rows_of(path: Path, **changes: Any) -> list[Row]:
    columns = Columns(**changes.pop("columns", {}))
    return read_rows(DataSpec(name="train", path=str(path), columns=columns, **changes))


def refusal(path: Path, **changes: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        rows_of(path, **changes)
    return caught.value


def test_a_row_with_defaults(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": "1+1?", "answer": "2", "level": 3}, {"prompt": "2+2?"})
    one, two = rows_of(path)
    assert one == Row(
        source="train", index=0, place=f"{path}:1", id="train:0", label="default", prompt="1+1?", reference="2",
        columns={"prompt": "1+1?", "answer": "2", "level": 3},
    )  # fmt: skip
    assert (two.index, two.id, two.reference) == (1, "train:1", None)


def test_named_columns(write_jsonl: Write) -> None:
    path = write_jsonl({"q": "1+1?", "gold": ["2", "two"], "kind": "math", "uid": 17})
    (row,) = rows_of(path, columns={"prompt": "q", "reference": "gold", "label": "kind", "id": "uid"}, label="other")
    assert (row.prompt, row.reference, row.label, row.id) == ("1+1?", ["2", "two"], "math", "17")


def test_dotted_columns(write_jsonl: Write) -> None:
    nested = {"prompt": "x", "reward_model": {"ground_truth": "7", "style": None}, "a.b": "whole", "a": {"b": "nested"}}
    path = write_jsonl(nested)
    assert rows_of(path, columns={"reference": "reward_model.ground_truth"})[0].reference == "7"
    assert rows_of(path, columns={"reference": "a.b"})[0].reference == "whole"
    assert rows_of(path, columns={"label": "reward_model.style"}, label="math")[0].label == "math"


def test_missing_column_is_told_with_row_name_and_names_present(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": "c", "answer": "3"})
    error = refusal(path, columns={"reference": "answer"})
    assert error.message == f"data set `train`: {path}:2: no column `answer`; it has: prompt"
    assert error.hint is not None and "columns: {reference: ...}" in error.hint


def test_column_of_another_name_counts_every_row(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": "a", "ground_truth": "1"}, {"prompt": "b", "ground_truth": "2"})
    error = refusal(path, columns={"reference": "ground_trth"})
    assert f"{path}:1: no column `ground_trth`; it has: prompt, ground_truth (2 of 2 rows have a fault" in error.message
    assert error.hint is not None and error.hint.startswith("did you mean `ground_truth`? ")


@pytest.mark.parametrize(
    ("row", "columns", "problem"),
    [
        ({"prompt": "a", "answer": None}, {"reference": "answer"}, "column `answer` is null"),
        ({"prompt": None}, {}, "column `prompt` is null"),
        ({"question": "a"}, {}, "no column `prompt`; it has: question"),
        ({}, {}, "no column `prompt`; it is empty"),
        ({"prompt": "a", "rm": {"style": "rule"}}, {"reference": "rm.truth"}, "no column `rm.truth`; it has: rm.style"),
        ({"prompt": "a", "rm": None}, {"reference": "rm.truth"}, "no column `rm.truth`; `rm` is NoneType, not an object"),
        ({"prompt": "a", "rm": {"truth": None}}, {"reference": "rm.truth"}, "column `rm.truth` is null"),
        ({"prompt": "a"}, {"label": "kind"}, "no column `kind`; it has: prompt"),
        ({"prompt": "a", "kind": 3}, {"label": "kind"}, "column `kind` must hold the label as text, it holds 3"),
        ({"prompt": "a", "kind": ""}, {"label": "kind"}, "column `kind` must hold the label as text, it holds ''"),
        ({"prompt": "a", "uid": None}, {"id": "uid"}, "column `uid` is null"),
        ({"prompt": "a", "uid": True}, {"id": "uid"}, "column `uid` must hold the id as text, it holds True"),
        ({"prompt": "a", "answer": 1, "reference": 2}, {}, "there is a column `answer` and a column `reference`"),
        ({"prompt": ""}, {}, "the prompt is empty"),
        ({"prompt": 3}, {}, "a prompt is text or a list of messages, not int"),
    ],
)
def test_refused_with_the_row(write_jsonl: Write, row: dict, columns: dict, problem: str) -> None:
    good = {"prompt": "good", "answer": "1", "kind": "math", "uid": "u", "rm": {"truth": "1"}}
    error = refusal(write_jsonl(good, row), columns=columns)
    assert "train.jsonl:2: " + problem in error.message


def test_null_is_no_reference_where_no_column_is_named(write_jsonl: Write) -> None:
    assert [row.reference for row in rows_of(write_jsonl({"prompt": "a", "answer": None}, {"prompt": "b", "answer": 0}))] == [None, 0]


def test_two_columns_for_references_in_one_set_are_refused(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": "c", "reference": "3"})
    message = refusal(path).message
    assert f"`answer` at {path}:1 and `reference` at {path}:3" in message
    assert [row.reference for row in rows_of(write_jsonl({"prompt": "c", "reference": "3"}))] == ["3"]


def test_labels_null_set_and_default(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": "a", "kind": "math"}, {"prompt": "b", "kind": None})
    assert [row.label for row in rows_of(path, columns={"label": "kind"}, label="chat")] == ["math", "chat"]
    assert [row.label for row in rows_of(path, columns={"label": "kind"})] == ["math", "default"]
    assert [row.label for row in rows_of(path, label="chat")] == ["chat", "chat"]


def test_equal_rows_stay_and_equal_ids_are_refused(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": "a", "uid": "x"}, {"prompt": "b", "uid": "y"}, {"prompt": "a", "uid": "x"})
    assert len(rows_of(path)) == 3
    assert f"{path}:3 has the id `x` of {path}:1" in refusal(path, columns={"id": "uid"}).message


def test_extract_reference(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": "a", "answer": "3 + 4 is 7\n#### 7 \r\n"}, {"prompt": "b", "answer": ["x #### 1", "#### 2"]})
    assert [row.reference for row in rows_of(path, extract_reference="#### (.*)")] == ["7", ["1", "2"]]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("no marks", "'#### (.*)' finds nothing in the reference 'no marks'"),
        ("#### ", "finds nothing"),
        (7, "needs text to look at, and the reference is int"),
        (None, "needs text to look at, and the reference is missing"),
        (["#### 1", "none"], "finds nothing in the reference 'none'"),
        ([], "needs text to look at, and the reference is list"),
    ],
)
def test_extract_reference_without_a_match(write_jsonl: Write, answer: Any, problem: str) -> None:
    error = refusal(write_jsonl({"prompt": "a", "answer": "#### 1"}, {"prompt": "b", "answer": answer}), extract_reference="#### (.*)")
    assert "train.jsonl:2: " in error.message and problem in error.message


@pytest.mark.parametrize(("pattern", "problem"), [("#### .*", "it has 0"), ("(a)(b)", "it has 2"), ("(", "is no regular expression")])
def test_extract_reference_with_a_bad_pattern(write_jsonl: Write, pattern: str, problem: str) -> None:
    assert problem in refusal(write_jsonl({"prompt": "a", "answer": "1"}), extract_reference=pattern).message


def test_limit_and_first_stop_the_reading(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": "a"}, {"prompt": "b"}, {"no": "prompt"})
    assert [row.prompt for row in rows_of(path, limit=2)] == ["a", "b"]
    spec = DataSpec(name="train", path=str(path), limit=2)
    assert len(read_rows(spec, first=1)) == 1
    assert len(read_rows(spec, first=5)) == 2
    assert "train.jsonl:3: no column `prompt`" in refusal(path, limit=3).message


@pytest.mark.parametrize("data", [b"", b"\n\r\n", b"\xef\xbb\xbf"])
def test_a_set_without_rows_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(data)
    assert refusal(path).message == f"data set `train`: {path} has no rows"


HISTORY = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hello", "name": "ann"},
    {"role": "assistant", "content": "there"},
    {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
]


def test_messages_keep_history_system_and_other_keys(write_jsonl: Write) -> None:
    (row,) = rows_of(write_jsonl({"messages": HISTORY}), columns={"prompt": "messages"}, system="unused")
    assert row.prompt == (*HISTORY[:3], {"role": "user", "content": "one two"})
    assert row.columns == {"messages": HISTORY}


def test_system_of_the_set_goes_before_rows_without_one(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": HISTORY[1:]}, {"prompt": HISTORY})
    one, two = rows_of(path, system="think")
    assert one.prompt[0] == {"role": "system", "content": "think"} and len(one.prompt) == 4
    assert two.prompt[0] == HISTORY[0]
    assert "plain text without turns" in refusal(write_jsonl({"prompt": "a"}), system="think").message


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "the list of messages is empty"),
        (["hello"], "message 1 must be an object with `role` and `content`, not str"),
        ([{"role": "user"}], "message 1 has no `content`; it has: role"),
        ([{"from": "human", "value": "x"}], "message 1 has no `role`; it has: from, value"),
        ([{"role": "human", "content": "x"}], "message 1 has the role 'human'"),
        ([{"role": "user", "content": None}], "the content of message 1 must be text, not NoneType"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "message 1 has a part of type 'image'; only text parts are supported yet"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1 has a part of type 'text'"),
        ([{"role": "user", "content": ["x"]}], "message 1 has a part of type 'str'"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "the last message is the assistant's"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "the last message is the system's"),
        ({"role": "user", "content": "x"}, "a prompt is text or a list of messages, not dict"),
    ],
)
def test_bad_messages(write_jsonl: Write, messages: Any, problem: str) -> None:
    assert "train.jsonl:1: " + problem in refusal(write_jsonl({"prompt": messages})).message


def test_fingerprint_is_of_content_and_order(write_jsonl: Write, tmp_path: Path) -> None:
    table = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    base = fingerprint(rows_of(write_jsonl(*table)))
    array = tmp_path / "train.json"
    array.write_text(json.dumps([dict(reversed(row.items())) for row in table]))
    assert len(base) == 64
    assert fingerprint(rows_of(array, label="math", columns={"reference": "answer"})) == base
    changed = [table[::-1], table[:1], [*table, table[0]], [table[0], {**table[1], "answer": 2}], [table[0], {**table[1], "extra": None}]]
    assert len({base, *(fingerprint(rows_of(write_jsonl(*other))) for other in changed)}) == 6


def test_spec_goes_through_json() -> None:
    spec = DataSpec(name="g", python="m:f", options={"size": 3}, weight=0.5, limit=7, columns=Columns(prompt="q"), extract_reference="(.)")
    assert from_data(DataSpec, json.loads(json.dumps(to_data(spec)))) == spec


@pytest.mark.parametrize(
    "changes",
    [{}, {"path": "a", "python": "m:f"}, {"python": "m:f", "split": "x"}, {"path": "a", "weight": 0.0}, {"path": "a", "weight": -1.0},
     {"path": "a", "weight": float("nan")}, {"path": "a", "limit": 0}, {"path": "a", "samples_per_prompt": 0}],
)  # fmt: skip
def test_spec_refuses_what_cannot_be_meant(changes: dict) -> None:
    with pytest.raises(UsageError, match="data set `g`"):
        DataSpec(name="g", **changes)


def test_as_chat_makes_a_text_prompt_one_user_message(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2?"}\n{"prompt": [{"role": "user", "content": "3+3?"}]}\n')
    rows = read_rows(DataSpec(name="set", path="rows.jsonl", as_chat=True, system="Be brief."), [tmp_path])
    system = {"role": "system", "content": "Be brief."}
    assert [row.prompt for row in rows] == [(system, {"role": "user", "content": "2+2?"}), (system, {"role": "user", "content": "3+3?"})]
    (plain, _) = read_rows(DataSpec(name="set", path="rows.jsonl"), [tmp_path])
    assert plain.prompt == "2+2?"
