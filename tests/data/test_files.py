"""Bytes to records: encodings, line ends, malformed lines, and every refusal with its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.data.files import FORMATS, Faults, file_records, locate, python_records
from rftcli.data.rows import read_rows
from rftcli.data.spec import DataSpec
from rftcli.errors import UsageError

ONE = b'{"prompt": "1+1?", "answer": "2"}'
TWO = b'{"prompt": "2+2?", "answer": "4"}'


def read(path: Path) -> list[tuple[str, dict]]:
    faults = Faults(source="train")
    records = list(file_records(path, faults))
    faults.raise_if_any(len(records))
    return records


def written(tmp_path: Path, data: bytes, name: str = "train.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data",
    [
        ONE + b"\n" + TWO + b"\n",
        ONE + b"\n" + TWO,
        b"\xef\xbb\xbf" + ONE + b"\r\n\r\n" + TWO,
        b"\n\n" + ONE + b"\n \t \n" + TWO + b"\n\n\n",
        b"\xef\xbb\xbf\r\n" + ONE + b"\r\n" + TWO + b"\r\n",
    ],
    ids=["plain", "no final newline", "windows", "blank lines", "blank first line with mark"],
)
def test_two_rows_however_the_lines_end(tmp_path: Path, data: bytes) -> None:
    records = read(written(tmp_path, data))
    assert [columns for _, columns in records] == [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}]


def test_places_are_lines_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, b"\n" + ONE + b"\r\n\r\n" + TWO)
    assert [place for place, _ in read(path)] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_row(tmp_path: Path, separator: str) -> None:
    escaped = separator if ord(separator) >= 0x20 else json.dumps(separator)[1:-1]
    path = written(tmp_path, f'{{"prompt": "a{escaped}b"}}\n'.encode() + TWO)
    assert [columns["prompt"] for _, columns in read(path)] == [f"a{separator}b", "2+2?"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "caf\xe9"}', "not UTF-8: byte 0xE9 at position 16"),
        (b'{"prompt": "1+1?"', "not JSON: Expecting ',' delimiter at column 18"),
        (ONE + TWO, "not JSON: Extra data at column 34"),
        (b'{"prompt": "x", "prompt": "y"}', "key `prompt` is given twice"),
        (b'{"prompt": "x", "extra": {"a": 1, "b": 2, "a": 1}}', "key `a` is given twice"),
        (b'{"prompt": "x", "score": NaN}', "NaN is not JSON"),
        (b'{"prompt": "x", "score": -Infinity}', "-Infinity is not JSON"),
        (b'{"prompt": "half \\ud83d"}', "half a surrogate pair"),
        (b'["prompt"]', "a row must be an object with columns, not a list"),
        (b"null", "a row must be an object with columns, not null"),
        (b"3", "a row must be an object with columns, not a number"),
        (b"[" * 100_000, "not usable: "),
        (b"\xef\xbb\xbf" + ONE, "not JSON: Unexpected UTF-8 BOM"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(tmp_path: Path, line: bytes, problem: str) -> None:
    path = written(tmp_path, ONE + b"\n\n" + line + b"\n" + TWO + b"\n")
    with pytest.raises(UsageError) as caught:
        read(path)
    assert f"{path}:3: " in caught.value.message
    assert problem in caught.value.message
    assert "rows have a fault" not in caught.value.message


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert read(written(tmp_path, b'{"prompt": "\\ud83d\\ude00"}'))[0][1] == {"prompt": "\U0001f600"}


def test_all_bad_lines_are_counted_and_the_first_is_shown(tmp_path: Path) -> None:
    path = written(tmp_path, b"\n".join([ONE, b"{", TWO, b"[", b"\xff"]))
    text = r"train\.jsonl:2: .*\(3 of 5 rows have a fault, .*; others: .*train\.jsonl:4: .*; .*train\.jsonl:5: not UTF-8"
    with pytest.raises(UsageError, match=text):
        read(path)


def test_utf16_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is UTF-16"):
        read(written(tmp_path, ONE.decode().encode("utf-16")))


def test_array_in_a_jsonl_file_gets_the_hint(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(written(tmp_path, b"[\n" + ONE + b"\n]"))
    assert caught.value.hint == "this looks like one JSON array: rename the file to .json"


def test_json_array(tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbf[\r\n" + ONE + b",\r\n" + TWO + b"]", "train.json")
    assert read(path) == [(f"{path} row 1", {"prompt": "1+1?", "answer": "2"}), (f"{path} row 2", {"prompt": "2+2?", "answer": "4"})]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"data": []}', "holds an object, not an array of objects"),
        (b"[" + ONE + b", 7]", "row 2: a row must be an object with columns, not a number"),
        (b"[\n" + ONE + b"\n" + TWO + b"]", r"train\.json:3: not JSON: Expecting ',' delimiter"),
        (b"[" + ONE, "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_bad_json_array(tmp_path: Path, data: bytes, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read(written(tmp_path, data, "train.json"))


@pytest.mark.parametrize("name", ["t.txt", "t.txt.gz", "t", "t.parquet.gz", "t.gz"])
def test_other_formats_are_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="unknown suffix") as caught:
        read(written(tmp_path, b"x", name))
    assert caught.value.hint is not None and ".jsonl, .json, .parquet, .csv, .tsv, .jsonl.gz" in caught.value.hint


def test_upper_case_suffix_is_the_same_format(tmp_path: Path) -> None:
    assert len(read(written(tmp_path, ONE, "TRAIN.JSONL"))) == 1
    assert all(suffix == suffix.lower() for suffix in FORMATS)


TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


@given(rows=st.lists(st.dictionaries(TEXT, VALUES, max_size=4), max_size=5), ascii_only=st.booleans(), end=st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[dict], ascii_only: bool, end: str) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.jsonl"
    path.write_bytes(end.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode("utf-8"))
    assert [columns for _, columns in read(path)] == rows


def test_relative_path_is_found_in_the_first_directory_that_has_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    written(tmp_path / "two", ONE, "x.jsonl")
    search = (tmp_path / "one", tmp_path / "two")
    assert locate("x.jsonl", search) == tmp_path / "two" / "x.jsonl"
    written(tmp_path / "one", ONE, "x.jsonl")
    assert locate("x.jsonl", search) == tmp_path / "one" / "x.jsonl"
    assert locate(str(tmp_path / "two" / "x.jsonl"), search) == tmp_path / "two" / "x.jsonl"


def test_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        locate("no.jsonl", (tmp_path / "one", tmp_path / "two"))
    assert str(tmp_path / "one" / "no.jsonl") in caught.value.message
    assert str(tmp_path / "two" / "no.jsonl") in caught.value.message


def test_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        locate(str(tmp_path), ())


def test_a_path_is_not_expanded_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the recipe's affair: a folder may be called `${x}`."""
    (tmp_path / "${RFT_TEST_DATA}").mkdir()
    path = written(tmp_path / "${RFT_TEST_DATA}", ONE)
    monkeypatch.setenv("RFT_TEST_DATA", str(tmp_path))
    assert locate(str(path), ()) == path


def test_home_in_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, ONE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/train.jsonl", ()) == path


SOURCE = """
import decimal
import helper_of_source_module
import rftcli.errors

def numbers(count, start=0):
    for value in range(start, start + count):
        yield {"prompt": f"{value}?", "answer": helper_of_source_module.double(value), "pair": (value, {1: 2})}

def endless():
    value = 0
    while True:
        yield {"prompt": str(value)}
        value += 1

def failing():
    yield {"prompt": "1?"}
    raise LookupError("no more")

def not_mappings():
    return ["1?", "2?"]

def not_json():
    yield {"prompt": "1?", "answer": decimal.Decimal(2)}

def missing_package():
    raise rftcli.errors.MachineError("needs a package", hint="pip install it")

constant = 3
"""


@pytest.fixture
def source_folder(tmp_path: Path):
    (tmp_path / "source_of_rows.py").write_text(SOURCE)
    (tmp_path / "helper_of_source_module.py").write_text("def double(value):\n    return value * 2\n")
    (tmp_path / "broken_source.py").write_text("import no_such_module_anywhere\n")
    before = list(sys.path)
    yield tmp_path
    assert sys.path == before
    for name in ("source_of_rows", "helper_of_source_module"):
        sys.modules.pop(name, None)


def from_python(target: str, folder: Path, limit: int | None = None, **options: object) -> list:
    return read_rows(DataSpec(name="made", python=target, options=options, limit=limit), (folder,))


def test_python_source_with_options(source_folder: Path) -> None:
    rows = from_python("source_of_rows:numbers", source_folder, count=2, start=5)
    assert [(row.place, row.prompt, row.reference) for row in rows] == [
        ("source_of_rows:numbers row 1", "5?", 10),
        ("source_of_rows:numbers row 2", "6?", 12),
    ]
    assert rows[0].columns["pair"] == (5, {1: 2})


def test_endless_python_source_ends_at_the_limit(source_folder: Path) -> None:
    assert [row.prompt for row in from_python("source_of_rows:endless", source_folder, limit=3)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("source_of_rows:failing", "`source_of_rows:failing` failed with LookupError: no more"),
        ("source_of_rows:not_mappings", r"row 1: a row must be an object with columns, not text \(2 of 2 rows"),
        ("source_of_rows:not_json", "column `answer` cannot be written as JSON: Object of type Decimal"),
        ("source_of_rows:numbers", "failed with TypeError: .*count"),
        ("source_of_rows:constant", "has no function `constant`"),
        ("source_of_rows:nothing", "has no function `nothing`"),
        ("source_of_rows", "does not name a function"),
        ("broken_source:rows", "cannot import `broken_source` for `broken_source:rows`: No module named 'no_such_module_anywhere'"),
    ],
)
def test_python_source_that_cannot_be_used(source_folder: Path, target: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        from_python(target, source_folder)


def test_our_own_errors_pass_through_a_python_source(source_folder: Path) -> None:
    from rftcli.errors import MachineError

    with pytest.raises(MachineError, match="needs a package"):
        list(python_records("source_of_rows:missing_package", {}, (source_folder,), Faults(source="made")))
