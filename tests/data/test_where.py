"""Row filters: what they say, what they refuse, and that nothing else can be said in them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.data.where import RowProblem, Where
from rftcli.errors import UsageError

ROW: dict[str, Any] = {
    "level": 3,
    "subject": "algebra",
    "tags": ["a", "b"],
    "extra": {"score": 0.5, "deep": {"x": None}},
    "any name": 1,
    "a.b": 7,
    "ok": True,
}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("level >= 3 and subject == 'algebra'", True),
        ('level > 3 or subject != "algebra"', False),
        ("1 < level <= 3", True),
        ("1 < level < 3", False),
        ("'a' in tags and 'c' not in tags", True),
        ("subject in ['algebra', 'geometry']", True),
        ("subject in ('geometry', 'x')", False),
        ("'alg' in subject", True),
        ("not (level == 3)", False),
        ("extra.score * 2 == 1", True),
        ("extra.deep.x == null", True),
        ("extra.deep.x is None", True),
        ("ok", True),
        ("ok == true and not false", True),
        ("row['any name'] == 1", True),
        ("a.b == 7", True),
        ("len(subject) > 3 and len(tags) == 2", True),
        ("int('4') - level == 1", True),
        ("lower('ABC') == 'abc'", True),
        ("level % 2 == 1 and -level < 0", True),
        ("  level == 3  ", True),
    ],
)
def test_answers(text: str, answer: bool) -> None:
    assert Where.parse(text).keeps(ROW) is answer


def test_later_parts_are_only_asked_for_when_they_matter() -> None:
    assert Where.parse("level == 3 or missing > 1").keeps(ROW)
    assert not Where.parse("level != 3 and missing > 1").keeps(ROW)


@pytest.mark.parametrize(
    "text",
    ["", "level =", "level = 3", "level >= ", "import os", "__import__('os')", "open('/etc/passwd')", "(lambda: 1)()", "level.__class__()",
     "[x for x in tags]", "level if ok else 1", "f'{level}'", "tags[0] == 'a'", "level ** 99999 > 1", "level << 9", "{'a': 1}",
     "len(subject, 1)", "len(x=1)", "len", "x := 3", "b'a' in tags", "~level == 1", "1j == 1", "row[0]", "-" * 1999 + "1", "a" * 2001],
)  # fmt: skip
def test_what_is_no_filter(text: str) -> None:
    if text == "len":  # a column of that name
        with pytest.raises(RowProblem, match="asks for a column `len`"):
            Where.parse(text).keeps(ROW)
        return
    with pytest.raises(UsageError):
        Where.parse(text)


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("levl >= 3", "asks for a column `levl`; it has: level, subject", "did you mean `level`?"),
        ("extra.scor > 1", "asks for a column `extra.scor`; it has: extra.score, extra.deep", "did you mean `extra.score`?"),
        ("level.x == 1", "asks for a column `level.x`; `level` is no object", None),
        (
            "subject >= 3",
            "cannot be answered: '>=' not supported between instances of 'str' and 'int'",
            "CSV holds text only: write `int(level) >= 3`",
        ),
        ("level", "gives 3, not true or false", "compare it with something"),
        ("level and ok", "cannot be answered: 3 is neither true nor false", None),
        ("subject * 99999999999 == 'a'", "cannot be answered: arithmetic with 'algebra' and 99999999999", None),
        ("level / 0 > 1", "cannot be answered: division by zero", None),
        ("int(subject) > 1", "cannot be answered: invalid literal", None),
        ("__class__ == 1", "asks for a column `__class__`", None),
        ("subject.upper == 1", "asks for a column `subject.upper`", None),
    ],
)
def test_rows_that_give_no_answer(text: str, problem: str, hint: str | None) -> None:
    with pytest.raises(RowProblem) as caught:
        Where.parse(text).keeps(ROW)
    assert problem in caught.value.args[0]
    assert hint is None or caught.value.args[1] == hint


@given(st.text(alphabet="abclevel ()[]'\"<>=!.,+-*/%01andornotin_", max_size=40))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        where = Where.parse(text)
    except UsageError:
        return
    with contextlib.suppress(RowProblem):
        assert where.keeps(ROW) in (True, False)
