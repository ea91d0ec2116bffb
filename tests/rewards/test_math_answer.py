r"""math_answer against golds: boxes, signs, percent, units, long texts, algebra, threads, time limits; with and without math-verify."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.rewards.inputs import RuleInput
from rftcli.rewards.math_answer import MathAnswer, readable_gold
from rftcli.rewards.worker import WorkerError, WorkerTimeout


def item(text: str, reference: Any) -> RuleInput:
    prompt = r"Put the final answer in \boxed{}, e.g. \boxed{7}."
    return RuleInput(text=text, prompt_text=prompt, reference=reference, columns={}, tokens=1, finish="stop", label="math", sample=0)


@pytest.fixture(scope="module")
def rule() -> Iterator[MathAnswer]:
    rule = MathAnswer()
    yield rule
    rule.close()


@pytest.fixture(scope="module")
def plain() -> MathAnswer:
    return MathAnswer(algebra=False)


# (gold, completion, score); all of these need no algebra
PLAIN = [
    # braces in boxes
    (r"\frac{3}{8}", r"\boxed{\frac{3}{8}}", 1),
    (r"\frac{3}{8}", r"\boxed{\frac{3}{5}}", 0),
    (r"\frac{3}{8}", r"\boxed{0.375}", 1),
    (r"\frac{3}{8}", r"\boxed{\sqrt{\frac{9}{64}}}", 1),
    ("42", r"\boxed{{42}}", 1),
    (r"\frac{2}{51}", r"\boxed{\frac{25}{1}}", 0),
    (r"\frac{25}{1}", r"\boxed{\frac{2}{51}}", 0),
    # signs and ranges
    ("-18", "#### -18", 1),
    ("-18", "#### 18", 0),
    ("-18", r"\boxed{-18}", 1),
    ("-18", "answer: \u221218", 1),
    ("-18", "The change from 20 to 2 is -18.", 1),
    ("18", "between 2-18", 1),
    ("-18", "between 2-18", 0),
    # percent and units: dropped on both sides
    (r"35\%", r"\boxed{35\%}", 1),
    (r"35\%", r"\boxed{35 percent}", 1),
    (r"35\%", r"\boxed{35}", 1),
    (r"35\%", r"\boxed{0.35}", 0),
    (r"35\%", r"\boxed{0.0035}", 0),
    ("35", r"\boxed{35\%}", 1),
    ("0.35", r"\boxed{35\%}", 0),
    (r"\pi", r"\boxed{\pi rad}", 1),
    (r"\pi rad", r"\boxed{\pi}", 1),
    ("45", r"\boxed{45^\circ}", 1),
    ("45", "#### 45 degrees", 1),
    ("45", r"\boxed{45 \text{ cm}}", 1),
    (r"45^\circ", r"\boxed{45}", 1),
    ("5 km", r"\boxed{5000 m}", 0),
    ("5000 m", r"\boxed{5 km}", 0),
    # whatever follows, however long
    ("26", "17+9=26\n#### 26\n" + "Thank you for asking. " * 30, 1),
    ("x_{1}+" * 25 + "1", r"\boxed{" + "x_{1}+" * 25 + "1}", 1),
    # the references of data sets
    ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 24", "#### 24", 1),
    (r"So the answer is $\boxed{12}$.", "12", 1),
    ("1,000", "#### 1000", 1),
    (18, "18 apples", 1),
    (0.5, r"\boxed{\frac12}", 1),
    (["3", "5"], r"\boxed{5}", 1),
    (["3", "5"], r"\boxed{4}", 0),
    (r"\text{(C)}", r"\boxed{C}", 1),
    ("no solution", r"\boxed{\text{No solution}}", 1),
    # the prompt is not the answer
    ("7", "I do not know.", 0),
    ("7", "", 0),
    ("7", r"\boxed{}", 0),
]

ALGEBRA = [
    ("x+1", r"\boxed{1+x}", 1),
    ("x+1", r"\boxed{x+2}", 0),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
    ("5", r"\boxed{2+3}", 1),
    (r"\sqrt{2}", r"\boxed{1.414214}", 1),
    (r"\sqrt{2}", r"\boxed{1.41}", 0),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}", 1),
    ("3, 5", r"\boxed{5, 3}", 1),
    (r"(1, 2)", r"\boxed{(2, 1)}", 0),
    (r"[1,2)", r"\boxed{[1, 2)}", 1),
    ("2x+3", r"\boxed{y = 3 + 2x}", 1),
    ("5x", r"\boxed{5}", 0),
    ("5 or 6", r"\boxed{5}", 0),
    (["x+1", "x+2"], r"\boxed{2+x}", 1),
    ("x+1", r"\boxed{x+1 is not it \frac}", 0),
    ("5", r"\boxed{((((((((}", 0),
]


@pytest.mark.parametrize(("gold", "text", "score"), PLAIN)
def test_without_algebra(rule: MathAnswer, plain: MathAnswer, gold: Any, text: str, score: float) -> None:
    assert plain(item(text, gold)) == score
    assert rule(item(text, gold)) == score


@pytest.mark.parametrize(("gold", "text", "score"), ALGEBRA)
def test_with_algebra(rule: MathAnswer, gold: Any, text: str, score: float) -> None:
    assert rule(item(text, gold)) == score


def test_without_math_verify_other_forms_are_equal_only_as_text(plain: MathAnswer) -> None:
    assert plain(item(r"\boxed{1+x}", "x+1")) == 0
    assert plain(item(r"\boxed{x + 1}", "x+1")) == 1


def test_from_a_worker_thread_as_from_the_main_thread(rule: MathAnswer) -> None:
    texts = [(r"\boxed{\frac{2}{9}}", r"\frac{2}{9}"), (r"\boxed{b+a}", "a+b")]
    before = signal.getsignal(signal.SIGALRM)
    main = [rule(item(text, gold)) for text, gold in texts]
    other: list[float] = []
    thread = threading.Thread(target=lambda: other.extend(rule(item(text, gold)) for text, gold in texts))
    thread.start()
    thread.join()
    assert main == other == [1.0, 1.0]
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_time_limit_is_an_error_and_the_next_sample_is_scored(rule: MathAnswer) -> None:
    with pytest.raises(WorkerTimeout, match=r"no verdict within 0\.3 seconds"):
        rule(item(r"\boxed{9^{9^{9^{9}}}}", "5"), time_limit_seconds=0.3)
    assert rule(item(r"\boxed{1+x}", "x+1")) == 1


def test_a_killed_helper_is_replaced() -> None:
    rule = MathAnswer()
    assert rule(item(r"\boxed{1+x}", "x+1")) == 1
    assert rule._workers is not None
    for pid in rule._workers.pids():
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # until it has ended, and leave it for its pool to find
    assert rule(item(r"\boxed{1+x}", "x+1")) == 1
    rule.close()


def test_plain_answers_start_no_helper() -> None:
    rule = MathAnswer()
    for gold, text, score in PLAIN:
        assert rule(item(text, gold)) == score
    assert rule._workers is not None and rule._workers.pids() == []
    rule.close()


UNREADABLE = ["", "   ", r"\frac{1}{", "????", "}{", r"$\,$", None, [], ["3", None], {"a": 1}, True]


@pytest.mark.parametrize("gold", UNREADABLE)
def test_an_unreadable_gold_is_an_error_whatever_the_answer(plain: MathAnswer, gold: Any) -> None:
    for text in (r"\boxed{3}", "I do not know.", ""):
        with pytest.raises(ValueError, match="reference answer"):
            plain(item(text, gold))
    assert readable_gold(gold) is None


def test_a_gold_that_algebra_cannot_read_is_an_error(rule: MathAnswer) -> None:
    with pytest.raises(WorkerError, match=r"the reference answer `a \? b` cannot be read as mathematics"):
        rule(item(r"\boxed{x+1}", "a ? b"))


@pytest.mark.parametrize(
    ("gold", "text"), [("#### 1,200 dollars", "1200"), (r"\boxed{x = 5}", "5"), (3, "3"), (["a+b", 2], "a+b | 2"), (r"\text{Monday}", "Monday")]
)
def test_readable_gold_shows_what_is_compared(gold: Any, text: str) -> None:
    assert readable_gold(gold) == text


def test_options(plain: MathAnswer) -> None:
    text = r"<think> \boxed{3} </think> so 4"
    assert plain(item(text, "3")) == 1
    assert plain(item(text, "4"), after="</think>") == 1
    assert plain(item("4", "4"), after="</think>") == 0
    assert plain(item("it is 4", "4"), read=["boxed", "hashes"]) == 0
    assert plain(item("#### 4\n5", "4"), read=["hashes"]) == 1


PIECES = st.lists(
    st.sampled_from(["\\boxed{", "}", "{", "####", "\n", "-", "7", "\\frac", "\\sqrt{", "%", "1,000", " ", "cm", "^", "x", "="]), max_size=20
)


@given(st.one_of(st.text(max_size=100), PIECES.map("".join)), st.one_of(st.text(max_size=30), PIECES.map("".join), st.integers(), st.none()))
@settings(max_examples=300, deadline=None)
def test_any_text_scores_0_or_1_or_has_an_unreadable_gold(plain: MathAnswer, text: str, gold: Any) -> None:
    if readable_gold(gold) is None:
        with pytest.raises(ValueError, match="reference answer"):
            plain(item(text, gold))
    else:
        assert plain(item(text, gold)) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("(1,2)", "[1,2]", 0), ("[1,2]", "(1,2]", 0), (r"(-\infty,3)", r"(-\infty, 3)", 1), (r"(-\infty,3)", r"(-\infty,3]", 0),
        (r"(3,4]\cup[1,2)", r"[1,2)\cup(3,4]", 1), (r"\{1,2\}", r"\{2,1\}", 1), (r"\{1,2\}", r"\{1,2,3\}", 0), ("1, 2", "2, 1", 1),
        (r"(0.5,\frac14)", r"(\frac{1}{2}, 0.25)", 1), ("2,-2", r"\pm 2", 1), (r"\pm 2", "2", 0), (r"\emptyset", r"\emptyset", 1),
        ("1,2", r"1 \text{ and } 2", 1), ("12_8", "12_{16}", 0), ("12_{16}", "12_{16}", 1), ("1010_2", "10", 1), ("1010_2", "1010", 0),
        ("2A_{16}", "42", 1), ("9_8", "9_8", 1), ("B", r"\text{(B)}", 1), ("1000", "1,000", 1), ("1024", "2^{10}", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", 0), ("50", r"50\%", 1), (r"50\%", "0.5", 0),
    ],
)  # fmt: skip
def test_intervals_sets_bases_and_choices(rule: MathAnswer, gold: str, answer: str, expected: float) -> None:
    assert rule(item(rf"\boxed{{{answer}}}", gold)) == expected
