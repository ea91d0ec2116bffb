r"""Where answers are found in tricky texts, and that no text takes long."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.rewards.find_answer import after_hashes, find_answer, last_box, last_number
from rftcli.rewards.rules import READ

BOXES = [
    (r"so \boxed{\frac{3}{8}}.", r"\frac{3}{8}"),
    (r"\boxed{{42}}", "{42}"),
    (r"\boxed{\sqrt{\frac{9}{64}}}", r"\sqrt{\frac{9}{64}}"),
    (r"first \boxed{3}, no, \boxed{4}", "4"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{3} and then \boxed{4 cut off", "3"),
    (r"\boxed{never closed", None),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{a \} b}", r"a \} b"),
    (r"{ stray \boxed{7}", "7"),
    (r"stray } \boxed{7}", "7"),
    (r"\\boxed{7}", "7"),
    (r"\fbox{7}", "7"),
    ("\\boxed {\n 7\n}", "7"),
    (r"\boxed{} was asked for, 5", None),
    (r"\boxed{7} as \boxed{} asks", "7"),
    (r"\notboxed{7}", None),
    (r"boxed{7}", None),
]

HASHES = [
    ("17+9=26\n#### 26\n" + "That is all. " * 50, "26"),
    ("#### -18", "-18"),
    ("#### 1\n#### 2", "2"),
    ("####26", "26"),
    ("so #### 26", "26"),
    ("#### 26\r\nbye", "26"),
    ("#### **26**", "**26**"),
    ("#### Answer: 26", "26"),
    ("#### The final answer is: $26", "$26"),
    ("#### $x + 1$", "$x + 1$"),
    ("#### x + y", "x + y"),
    ("#### sqrt(2)/2", "sqrt(2)/2"),
    ("#### B", "B"),
    ("#### Step 3: conclude\nit is 42", None),
    ("#### 26\n#### Conclusion", "26"),
    ("####\n26", None),
    ("### 26", None),
]

NUMBERS = [
    ("The change from 20 to 2 is -18.", "-18"),
    ("answer: \u221218", "-18"),
    ("between 2-18", "18"),
    ("between 2\u201318", "18"),
    ("the answer \u2014 18", "18"),
    ("on page-18", "18"),
    ("(-18)", "-18"),
    ("x=-18", "-18"),
    ("is -$18.", "-$18"),
    ("costs $18.", "$18"),
    ("$-18$", "$-18"),
    ("20-18=2", "2"),
    ("x^2-18", "18"),
    ("1,000 men", "1,000"),
    ("1,000.50", "1,000.50"),
    ("1,2,3", "3"),
    (".5", ".5"),
    ("it is 5.", "5"),
    ("35%", "35"),
    ("18 km", "18"),
    ("in 2024-05-18", "18"),
    ("so 3/8", "3/8"),
    (r"so $\frac{3}{8}$.", r"$\frac{3}{8}"),
    (r"so $3\frac{1}{2}$.", r"$3\frac{1}{2}"),
    ("so 3 1/2", "3 1/2"),
    ("1.5 x 10^3 J", "1.5 x 10^3"),
    (r"1.5 \times 10^{-3}", r"1.5 \times 10^{-3}"),
    ("2e-3", "2e-3"),
    (r"$45^\circ$", "$45"),
    (r"so $5\sqrt{2}$", None),
    (r"so $x^{2}$", None),
    (r"so $x_2$", None),
    ("variable x2", None),
    ("I do not know.", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "content"), BOXES)
def test_last_box(text: str, content: str | None) -> None:
    assert last_box(text) == content


@pytest.mark.parametrize(("text", "answer"), HASHES)
def test_after_hashes(text: str, answer: str | None) -> None:
    assert after_hashes(text) == answer


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_the_order_is_box_then_hashes_then_number() -> None:
    text = "\\boxed{1}\n#### 2\nin all 3"
    assert find_answer(text) == "1"
    assert find_answer(text, read=("number", "hashes")) == "2"
    assert find_answer(text, read=("number",)) == "3"
    assert find_answer("nothing here", read=READ) is None


def test_a_long_box_and_a_long_tail_are_found() -> None:
    content = "x_{1}+" * 25 + "1"
    assert len(content) > 150
    assert find_answer("a " * 5000 + "\\boxed{" + content + "}" + " bye" * 5000) == content


@pytest.mark.parametrize(
    "junk", ["(", "\\", "{", "}", "\\boxed{", "#### ", "####", "1,111", "1 ", "9", "-", "$", "\\frac{1", "1e", "a ", "\n", "1/2"]
)
def test_time_is_linear_in_the_text(junk: str) -> None:
    start = time.perf_counter()
    find_answer(junk * (200_000 // len(junk)))
    assert time.perf_counter() - start < 20.0  # a quadratic pattern takes minutes


PIECES = st.lists(
    st.sampled_from(["\\boxed{", "{", "}", "\\", "####", " ", "\n", "-", "7", "1,234", "\\frac{1}{2}", "^", "_", "$", "x", "%"]), max_size=30
)


@given(st.one_of(st.text(max_size=200), PIECES.map("".join)))
@settings(max_examples=300, deadline=None)
def test_any_text_gives_an_answer_or_none(text: str) -> None:
    answer = find_answer(text)
    assert answer is None or (isinstance(answer, str) and answer != "")
