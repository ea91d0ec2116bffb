"""Numbers, durations, curves and foreign text, as observers print them."""

import doctest
import io
import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.observe import text as room
from rftcli.observe.numbers import flatten, flatten_evals, means_with_intervals, number
from rftcli.observe.samples import first_samples
from rftcli.observe.text import clean, columns_of, duration, first_line, interval, path_end, percent, short, sparkline


def test_examples():
    assert doctest.testmod(room).failed == 0


def test_only_a_terminal_has_columns(on_terminal, tmp_path):
    assert on_terminal(60, lambda stream: stream.write(str(columns_of(stream)))) == "60"
    with (tmp_path / "file").open("w") as file:
        assert columns_of(file) is None
    assert columns_of(file) is None and columns_of(io.StringIO()) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (0.5314, "0.531"),
        (-0.00312, "-0.0031"),
        (1.0, "1.00"),
        (12.345, "12.3"),
        (4821.4, "4821"),
        (1e-6, "1e-6"),
        (1.24e-4, "1.2e-4"),
        (3.2e7, "3.2e7"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_short(value, text):
    assert short(value) == text


@given(st.floats())
def test_short_is_short(value):
    assert len(short(value)) <= 9
    if 1e-9 < abs(value) < 1e9:
        assert len(short(value)) <= 7
        assert float(short(value)) == pytest.approx(value, rel=0.06)


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0%"), (0.001, "<1%"), (0.254, "25%"), (0.999, "99%"), (1.0, "100%"), (1.5, "150%"), (math.nan, "nan")]
)
def test_percent_never_rounds_to_all_or_nothing(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (9.44, "9.4s"),
        (59.96, "1m00s"),
        (185, "3m05s"),
        (3599.6, "1h00m"),
        (7620, "2h07m"),
        (86400 * 3 + 4 * 3600, "3d04h"),
        (-1, "0.0s"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_coarse_duration_leaves_out_seconds_from_ten_minutes():
    assert duration(599, coarse=True) == "9m59s"
    assert duration(640, coarse=True) == "10m"
    assert duration(7620, coarse=True) == "2h07m"


def test_interval():
    assert interval(0.5, 0.4, 0.6) == "0.500 [0.400,0.600]"
    assert interval(0.5, None, 0.6) == "0.500"


def test_flatten_joins_names_and_reads_numbers_written_as_text():
    metrics = {"kl": 0.5, "seconds": {"rollout": 3, "note": "warm"}, "loss": "nan", "grad_norm": "inf", "on": True, "kind": "grpo", "gap": None}
    flat = flatten(metrics, "/")
    assert math.isnan(flat.pop("loss"))
    assert flat == {"kl": 0.5, "seconds/rollout": 3.0, "grad_norm": math.inf}
    assert number("-inf") == -math.inf
    assert number(False) is None


def test_flatten_evals_gives_the_value_the_metrics_own_name():
    sets = {"gsm8k": {"mean@1": {"value": 0.5, "low": 0.4, "high": 0.6}, "prompts": 64}, "own.set": {"pass@4": {"value": 1}}}
    assert flatten_evals(sets, "/") == {
        "gsm8k/mean@1": 0.5,
        "gsm8k/mean@1/low": 0.4,
        "gsm8k/mean@1/high": 0.6,
        "gsm8k/prompts": 64.0,
        "own.set/pass@4": 1.0,
    }
    assert means_with_intervals(sets["gsm8k"]) == {"mean@1": (0.5, 0.4, 0.6)}
    assert means_with_intervals(sets["own.set"]) == {"pass@4": (1.0, None, None)}


def test_sparkline_draws_means_of_equal_stretches():
    assert sparkline(range(8), range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(range(8), range(8), 4) == "▁▃▆█"
    assert sparkline(range(8), range(8), 8, ascii_only=True) == "_.:-=+*#"
    assert sparkline([1, 2, 3], [5.0, 5.0, 5.0], 10) == "▅▅▅"
    assert sparkline([1, 2, 3], [0.0, math.nan, 1.0], 10) == "▁█"
    assert sparkline([1, 2, 101], [0.0, 0.0, 1.0], 3) == "▁▁█"  # by step, not by position
    assert sparkline([], [], 10) == ""
    assert sparkline([1], [math.nan], 10) == ""
    assert sparkline([1], [3.0], 10) == "▅"


@given(st.lists(st.floats(), max_size=50), st.integers(0, 30))
def test_sparkline_never_fails_and_never_overflows(values, width):
    assert len(sparkline(range(len(values)), values, width)) <= width


HOSTILE = [
    ("\x1b[31mred\x1b[0m", "red"),
    ("\x1b]0;title\x07text", "text"),
    ("\x1b]8;;http://x\x1b\\link", "link"),
    ("\x1bcreset", "reset"),
    ("\x1b]never closed", "\ufffd]never closed"),
    ("a\x07b\x00c", "a\ufffdb\ufffdc"),
    ("\x9b31mred", "\ufffd31mred"),
    ("abc\u202edef", "abc\ufffddef"),
    ("lone \ud800 surrogate", "lone \ufffd surrogate"),
    ("one\ntwo\r\nthree\u2028four", "one two three four"),
    ("\ttab", "    tab"),
    ("[bold]kept[/bold]", "[bold]kept[/bold]"),
    ("日本語 👩\u200d🚀", "日本語 👩\u200d🚀"),
]


@pytest.mark.parametrize(("text", "safe"), HOSTILE)
def test_clean_takes_the_power_out_of_foreign_text(text, safe):
    assert clean(text, 100) == safe


def test_clean_keeps_lines_and_cuts():
    assert clean("one\r\ntwo\u2028three", 100, lines=True) == "one\ntwo\nthree"
    assert clean("x" * 200_000, 10) == "xxxxxxx..."
    assert clean("x" * 10, 10) == "x" * 10
    assert len(clean("\x1b[31m" * 50_000, 10)) <= 10


def test_first_line():
    assert first_line("\n out of \x1b[31mmemory\nhint: fewer rows", 100) == "out of memory"
    assert first_line("", 100) == ""
    assert first_line("x" * 99, 10) == "xxxxxxx..."


def test_path_end_keeps_what_tells_paths_apart():
    assert path_end("/runs/a/policy", 20) == "/runs/a/policy"
    assert path_end("/home/me/long/way/to/checkpoints/step_000030/policy/", 40) == ".../step_000030/policy"
    assert path_end("/a/" + "x" * 99 + "end", 20) == ".../" + "x" * 13 + "end"


@given(st.text(st.characters(), max_size=300), st.integers(3, 50), st.booleans())
def test_clean_is_always_safe(text, limit, lines):
    safe = clean(text, limit, lines=lines)
    assert len(safe) <= limit
    assert all(unicodedata.category(c) not in ("Cc", "Cs") or (lines and c == "\n") for c in safe)
    safe.encode("utf-8")


def test_first_samples_reads_a_few_and_passes_over_what_is_broken(tmp_path, write_samples):
    assert first_samples(tmp_path, 3, 5) == []
    write_samples(tmp_path, 3, [{"draw": d, "completion": "a\u2028b" * 10} for d in range(10)])
    path = tmp_path / "samples" / "step_000003.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([b"[1, 2]", b'{"draw": torn', b'{"draw": 77, "completion": "' + b"x" * 9_000_000 + b'"}', *lines, b'{"draw": 99}']))
    assert [s["draw"] for s in first_samples(tmp_path, 3, 4)] == [0, 1, 2, 3]
    assert [s["draw"] for s in first_samples(tmp_path, 3, 99)] == list(range(10))
