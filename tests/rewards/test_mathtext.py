"""Decoration, numbers and equality of answers; every comparison is made both ways round."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.rewards.mathtext import as_number, balanced, canonical, clean, is_words, read, same

CLEAN = [
    ("$x + 1$", "x + 1"),
    (r"\(5\)", "5"),
    (r"\left( 1, 2 \right)", "( 1, 2 )"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\text{Monday}", "Monday"),
    (r"\text{(C)}", "C"),
    ("(C)", "C"),
    ("C.", "C"),
    ("**5**.", "5"),
    ("x = 5", "5"),
    ("y=2x+3", "2x+3"),
    ("a = b = c", "a = b = c"),
    ("\u221218", "-18"),
    ("1,234,567", "1234567"),
    ("1{,}234", "1234"),
    (r"1\,234", "1234"),
    ("(1,234)", "(1,234)"),
    ("1,2,3", "1,2,3"),
    (r"\$5", "5"),
    ("\u20ac5", "5"),
    (r"35\%", "35"),
    ("35 percent", "35"),
    (r"45^\circ", "45"),
    (r"45^{\circ}", "45"),
    ("45 degrees", "45"),
    ("45 cm", "45"),
    ("45cm", "45"),
    ("5 m", "5"),
    ("5m", "5"),
    ("5 m/s^2", "5"),
    (r"5\text{ m}/\text{s}^2", "5"),
    ("60 miles per hour", "60"),
    ("26 apples", "26"),
    (r"\pi rad", r"\pi"),
    (r"5\sqrt{2} \text{ cm}", r"5\sqrt{2}"),
    (r"\frac{1}{2} cm", r"\frac{1}{2}"),
    ("5x", "5x"),
    ("5 x", "5 x"),
    ("2m+1", "2m+1"),
    ("x^2 h", "x^2 h"),
    ("5 million", "5 million"),
    (r"5 \text{ million}", r"5 \text{ million}"),
    ("5 or 6", "5 or 6"),
    ("infinity", r"\infty"),
]

NUMBERS = [
    ("7", Fraction(7)),
    ("-7", Fraction(-7)),
    ("- 7", Fraction(-7)),
    ("+7", Fraction(7)),
    ("0.375", Fraction(3, 8)),
    (".5", Fraction(1, 2)),
    ("3/8", Fraction(3, 8)),
    ("-3/8", Fraction(-3, 8)),
    (r"\frac{3}{8}", Fraction(3, 8)),
    (r"-\frac{3}{8}", Fraction(-3, 8)),
    (r"\frac{-3}{-8}", Fraction(3, 8)),
    (r"\frac12", Fraction(1, 2)),
    (r"\frac{\frac{1}{2}}{2}", Fraction(1, 4)),
    (r"\sqrt{\frac{9}{64}}", Fraction(3, 8)),
    (r"\sqrt{16}", Fraction(4)),
    (r"\sqrt 9", Fraction(3)),
    ("sqrt(16)", Fraction(4)),
    (r"\sqrt{2}", None),
    (r"\sqrt{-4}", None),
    ("3 1/2", Fraction(7, 2)),
    ("31/2", Fraction(31, 2)),
    (r"-3\frac{1}{2}", Fraction(-7, 2)),
    ("{42}", Fraction(42)),
    ("(42)", Fraction(42)),
    ("(1)/(2)", Fraction(1, 2)),
    ("1.5 \\times 10^{3}", Fraction(1500)),
    ("2e-3", Fraction(1, 500)),
    ("1e999999999", None),
    ("1/0", None),
    (r"\frac{1}{0}", None),
    ("1/2/3", None),
    ("(1,234)", None),
    ("2+3", None),
    ("5x", None),
    ("", None),
    ("9" * 5000, None),
    ("{" * 200, None),
    ("-" * 299 + "1", None),
]

SAME = [
    (r"\frac{3}{8}", "0.375", True),
    (r"\frac{3}{8}", r"\frac{3}{5}", False),
    (r"\frac{2}{51}", r"\frac{25}{1}", False),
    ("-18", "18", False),
    # percent: dropped on both sides
    (r"35\%", "35 percent", True),
    (r"35\%", "35", True),
    (r"35\%", "0.35", False),
    (r"35\%", "0.0035", False),
    ("35", "0.35", False),
    # units: dropped on both sides, never converted
    (r"\pi", r"\pi rad", True),
    ("45", r"45^\circ", True),
    ("45", "45 degrees", True),
    (r"45^\circ", "45 cm", True),
    ("5 km", "5000 m", False),
    ("5 km", "5", True),
    ("5 million", "5", None),
    # decimals
    ("1/3", "0.333333", True),
    ("2/3", "0.666667", True),
    ("1/3", "0.33", False),
    ("1/3", "0.333", False),
    ("0.1", "0.10", True),
    ("1000000", "1000001", False),
    ("0.3000001", "0.3", True),
    # text
    ("no solution", "No Solution", True),
    ("no solution", "two solutions", False),
    ("Monday", "5", False),
    ("x + 1", "x+1", True),
    ("x+1", "1+x", None),
    ("3 1/2", "31/2", False),
    ("C", "(C)", True),
    ("5", "", False),
    ("2+3", "5", None),
]


@pytest.mark.parametrize(("raw", "expected"), CLEAN)
def test_clean(raw: str, expected: str) -> None:
    assert clean(raw) == expected


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_as_number(text: str, number: Fraction | None) -> None:
    assert as_number(text) == number


@pytest.mark.parametrize(("gold", "answer", "verdict"), SAME)
def test_same_both_ways(gold: str, answer: str, verdict: bool | None) -> None:
    assert same(read(gold), read(answer)) is verdict
    assert same(read(answer), read(gold)) is verdict


def test_algebra_gets_fractions_in_lowest_terms_and_decimals_as_written() -> None:
    assert [canonical(read(text)) for text in ("3 1/2", "0.50", "1,000", "x+1")] == ["7/2", "0.50", "1000", "x+1"]


def test_balanced_and_words() -> None:
    assert [balanced(text) for text in ("{a}", "{", "}{", r"\{", r"\{ {x} \}")] == [True, False, False, True, True]
    assert [is_words(text) for text in ("no solution", "Monday", "ab", "xyz", "x + y", "12 days", r"\text{Monday}")] == [True, True] + [False] * 5


PIECES = st.lists(
    st.sampled_from(["\\frac", "\\sqrt", "{", "}", "(", ")", "-", "7", "0", ".", ",", "/", "\\text{", " cm", "%", "e9", "^", "=", "x"]), max_size=25
)


@given(st.one_of(st.text(max_size=200), PIECES.map("".join)))
@settings(max_examples=300, deadline=None)
def test_any_text_can_be_read_and_equals_itself(raw: str) -> None:
    answer = read(raw)
    assert same(answer, read(raw)) is (answer.text != "")


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=50))
def test_a_fraction_is_read_in_all_its_forms(value: Fraction) -> None:
    sign, above, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
    whole, rest = divmod(above, below)
    for text in (
        f"{sign}{above}/{below}",
        f"{sign}\\frac{{{above}}}{{{below}}}",
        f"{sign}{whole} {rest}/{below}",
        f"{sign}{whole}\\dfrac{{{rest}}}{{{below}}} cm",
    ):
        assert read(text).number == value
