"""Every format gives the same rows; what each cannot hold is said with its place."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from rftcli.data.files import FORMATS, PACKED, locate
from rftcli.data.origin import looks_like_hub_id, origin_of
from rftcli.data.rows import read_rows, read_table
from rftcli.data.spec import DataSpec
from rftcli.errors import MachineError, UsageError
from rftcli.recipe import expand

ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": 'naïve, "quoted"\nsecond line', "answer": "x\ty"}, {"prompt": "3+3?", "answer": None}]


def rows_of(path: Path | str, folder: Path = Path(), **changes: Any) -> list[tuple[str, Any]]:
    return [(row.prompt, row.reference) for row in read_rows(DataSpec(name="s", path=str(path), **changes), (folder,))]


def written(path: Path, content: str | bytes) -> Path:
    data = content if isinstance(content, bytes) else content.encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def refusal(path: Path, **changes: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        rows_of(path, **changes)
    return caught.value


def as_csv(delimiter: str) -> str:
    def field(value: str | None) -> str:
        return "" if value is None else '"' + value.replace('"', '""') + '"'

    return "".join(delimiter.join(map(field, row)) + "\r\n" for row in (("prompt", "answer"), *(row.values() for row in ROWS)))


def save_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: written(path, "".join(json.dumps(row) + "\n" for row in ROWS)),
    "a.jsonl.gz": lambda path: written(path, "".join(json.dumps(row) + "\n" for row in ROWS)),
    "a.json": lambda path: written(path, json.dumps(ROWS)),
    "a.json.gz": lambda path: written(path, json.dumps(ROWS)),
    "a.csv": lambda path: written(path, as_csv(",")),
    "a.CSV.gz": lambda path: written(path, as_csv(",")),
    "a.tsv": lambda path: written(path, "\ufeff" + as_csv("\t")),
    "a.tsv.gz": lambda path: written(path, as_csv("\t")),
    "a.parquet": lambda path: save_parquet(path, ROWS),
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
    "saved_splits": lambda path: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert rows_of(tmp_path / name) == [(row["prompt"], row["answer"]) for row in ROWS]
    assert rows_of(name, tmp_path, limit=2) == [(row["prompt"], row["answer"]) for row in ROWS[:2]]


def test_every_suffix_is_tried_above() -> None:
    assert {Path(name.lower().removesuffix(PACKED)).suffix for name in WRITERS} - {""} == set(FORMATS)


def test_the_recipe_knows_the_suffixes() -> None:
    """`recipe` imports no other room: what it repeats is held to the original."""
    assert set(expand.DATA_FILES) == {*FORMATS, PACKED}
    for path in ("org/name", "org/name.v2", "a/b.jsonl", "a/b.jsonl.gz", "a/b/c", "./a/b", "name", "-a/b", "a b/c", "a/b.CSV"):
        assert expand.looks_like_hub_id(path) == looks_like_hub_id(path) == (path in ("org/name", "org/name.v2"))


def test_csv_is_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "prompt,level,answer\n1?,007,\n")
    (row,) = read_rows(DataSpec(name="s", path=str(path)))
    assert row.columns == {"prompt": "1?", "level": "007", "answer": None} and row.reference is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("prompt,answer\n1?,2\n3?,4,5\n", "a.csv:3: the row has 3 fields, the header has 2"),
        ("prompt,answer\n\n1?\n", "a.csv:3: the row has 1 fields, the header has 2"),
        ('prompt,answer\n"two\nlines",2\n3?\n', "a.csv:4: the row has 1 fields"),
        (b"prompt,answer\n1?,2\ncaf\xe9,2\n", "a.csv:3: not UTF-8: byte 0xE9 at position 4"),
        ('prompt,answer\n1?,2\n"open,2\n', "a.csv:3: not CSV: unexpected end of data"),
        ('prompt,answer\n"a"b,2\n', "a.csv:2: not CSV"),
        ("prompt,prompt\n1?,2\n", "a.csv:1: two columns are called `prompt`"),
        ("prompt,\n1?,2\n", "a.csv:1: column 2 has no name"),
        ("", "a.csv is empty"),
        ("prompt,answer\n", "has no rows"),
        ("prompt,answer\n,2\n", "a.csv:2: column `prompt` is null"),
    ],
)
def test_faults_of_csv(tmp_path: Path, content: str | bytes, problem: str) -> None:
    assert problem in refusal(written(tmp_path / "a.csv", content)).message


def test_a_field_may_be_long(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", f"prompt\n{'x' * 300_000}\n")
    assert len(rows_of(path)[0][0]) == 300_000


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.json.gz"])
def test_a_packed_file_that_is_cut_short(tmp_path: Path, name: str) -> None:
    WRITERS[{"a.csv.gz": "a.CSV.gz"}.get(name, name)](tmp_path / name)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-12])
    assert "cannot be unpacked" in refusal(tmp_path / name).message
    (tmp_path / name).write_bytes(b"{}")
    assert "cannot be unpacked" in refusal(tmp_path / name).message


def test_types_of_parquet(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "1?"}], "answer": decimal.Decimal("2.50"), "day": datetime.date(2024, 5, 6),
        "big": 2**63 - 1, "extra": {"level": 3, "tags": ["a"]},
    }  # fmt: skip
    save_parquet(tmp_path / "a.parquet", [row] * 2500)
    rows = read_rows(DataSpec(name="s", path=str(tmp_path / "a.parquet")))
    assert len(rows) == 2500 and rows[-1].place.endswith("a.parquet row 2500")
    assert rows[0].prompt == ({"role": "user", "content": "1?"},) and rows[0].reference == "2.50"
    assert rows[0].columns["day"] == "2024-05-06" and rows[0].columns["big"] == 2**63 - 1 and rows[0].columns["extra"] == {"level": 3, "tags": ["a"]}


def test_what_parquet_holds_and_json_does_not(tmp_path: Path) -> None:
    save_parquet(tmp_path / "a.parquet", [{"prompt": "1?", "score": 0.5}, {"prompt": "2?", "score": float("nan")}])
    assert "a.parquet row 2: column `score` cannot be written as JSON" in refusal(tmp_path / "a.parquet").message
    save_parquet(tmp_path / "b.parquet", [{"prompt": "1?", "image": b"\x89PNG"}])
    assert "b.parquet row 1: column `image`" in refusal(tmp_path / "b.parquet").message


@pytest.mark.parametrize("content", [b"", b"x", b"PAR1" + b"\0" * 20 + b"PAR1"])
def test_no_parquet(tmp_path: Path, content: bytes) -> None:
    assert "cannot be read as Parquet" in refusal(written(tmp_path / "a.parquet", content)).message


def splits(folder: Path) -> Path:
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one.select([0])}).save_to_disk(folder)
    return folder


def test_a_split_is_never_guessed(tmp_path: Path) -> None:
    folder = splits(tmp_path / "many")
    assert rows_of(folder, split="test") == [("1+1?", "2")]
    assert read_rows(DataSpec(name="s", path=str(folder), split="train"))[1].place == f"{folder}[train] row 2"
    error = refusal(folder)
    assert "has several splits" in error.message and error.hint == "say which: `split: train`; there are train, test"
    error = refusal(folder, split="tset")
    assert "has no split `tset`, did you mean `test`?" in error.message and error.hint == "it has train, test"


def test_a_split_that_means_nothing(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert "has no splits, so `split: train` means nothing" in refusal(tmp_path / "one", split="train").message
    path = WRITERS["a.jsonl"](tmp_path / "a.jsonl")
    assert "`split` means nothing for the file" in refusal(path, split="train").message
    assert "`options` means nothing for the file" in refusal(path, options={"name": "x"}).message
    assert "was saved whole, it takes no `options`" in refusal(tmp_path / "one", options={"name": "x"}).message


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own offline mode and a cache of its own: nothing is asked for over the network."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


def repository(folder: Path) -> Path:
    """A folder as a data set's repository on the hub looks."""
    (folder / "data").mkdir(parents=True)
    save_parquet(folder / "data" / "train-00000-of-00001.parquet", ROWS)
    save_parquet(folder / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    return folder


def test_a_folder_of_data_files_is_read_like_the_hub(tmp_path: Path, no_hub: None) -> None:
    folder = repository(tmp_path / "repo")
    assert rows_of(folder, split="train") == [(row["prompt"], row["answer"]) for row in ROWS]
    assert rows_of("repo", tmp_path, split="test") == [("1+1?", "2")]
    files = {"mine": "data/test-*.parquet"}
    assert rows_of(folder, split="mine", options={"data_files": files}) == [("1+1?", "2")]
    error = refusal(folder, split="train", options={"data_file": files})
    assert "there is no option `data_file`, did you mean `data_files`?" in error.message
    assert "cannot be read: " in refusal(folder, split="train", options={"data_files": "no-*.parquet"}).message


def test_a_streamed_folder_gives_the_same_rows(tmp_path: Path, no_hub: None) -> None:
    folder = repository(tmp_path / "repo")
    assert rows_of(folder, split="train", streaming=True) == rows_of(folder, split="train")


def test_a_folder_without_data(tmp_path: Path, no_hub: None) -> None:
    (tmp_path / "empty").mkdir()
    assert "cannot be read" in refusal(tmp_path / "empty").message


def test_a_hub_that_does_not_answer_is_the_machines_fault(tmp_path: Path, no_hub: None) -> None:
    with pytest.raises(MachineError) as caught:
        rows_of("no-such-org/no-such-set", tmp_path)
    assert "the hub does not answer for `no-such-org/no-such-set`" in caught.value.message
    assert "there is no such file or folder here" in caught.value.message and caught.value.exit_code == 3


def test_hub_or_missing_file(tmp_path: Path) -> None:
    """What exists is what it is; `org/name` is the hub's; everything else is a file that is missing."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert origin_of(DataSpec(name="s", path="org/name"), (tmp_path,)).kind == "folder"
    assert origin_of(DataSpec(name="s", path="org/other"), (tmp_path,)).kind == "hub"
    for missing in ("org/name/deep", "train", "./org/other", "org/other.jsonl", "/org/other"):
        with pytest.raises(UsageError, match="no such file"):
            origin_of(DataSpec(name="s", path=missing), (tmp_path,))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/null")):
        with pytest.raises(UsageError, match="is no regular file"):
            locate(str(path), ())
        assert "is no regular file" in refusal(path).message


def test_counts_of_a_filtered_set(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", "".join(json.dumps({"prompt": str(n), "level": n}) + "\n" for n in range(10)))
    table = read_table(DataSpec(name="s", path=str(path), where="level % 2 == 0", limit=3))
    assert ([row.prompt for row in table.rows], table.filtered, table.complete) == (["0", "2", "4"], 2, True)
    quick = read_table(DataSpec(name="s", path=str(path), where="level >= 3"), first=5)
    assert ([row.prompt for row in quick.rows], quick.filtered, quick.complete) == (["3", "4"], 3, False)
    assert [row.index for row in quick.rows] == [0, 1]
    with pytest.raises(UsageError, match="has no rows: `where: level > 99` lets none of 10 rows pass"):
        read_table(DataSpec(name="s", path=str(path), where="level > 99"))
