"""What a scan says about the data, and what that means for the reward table."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from rftcli.codec import from_data, to_data
from rftcli.data.spec import Columns, DataSpec
from rftcli.errors import UsageError
from rftcli.probe.cache import versions
from rftcli.probe.data import DataFacts, LabelFacts, label_problems, scan, user_cache_dir

Write = Callable[..., Path]
TABLE = (
    {"prompt": "a", "kind": "math", "answer": "1"},
    {"prompt": "b", "kind": "chat", "answer": None},
    {"prompt": "c", "kind": "math"},
    {"prompt": "d", "kind": None, "answer": "4"},
)


def settled(path: Path, seconds_ago: float = 60.0) -> Path:
    """The file as if it had been written a while ago."""
    stat = path.stat()
    os.utime(path, (stat.st_atime, stat.st_mtime - seconds_ago))
    return path


def spec_of(path: Path, **changes: object) -> DataSpec:
    return DataSpec(name="train", path=str(path), columns=Columns(label="kind"), **changes)


def test_labels_references_and_size(write_jsonl: Write, tmp_path: Path) -> None:
    path = write_jsonl(*TABLE)
    (facts,) = scan([spec_of(path)], cache_dir=tmp_path / "cache").sets
    assert (facts.name, facts.origin, facts.complete, facts.rows, facts.bytes) == ("train", str(path), True, 4, path.stat().st_size)
    assert (facts.columns, len(facts.fingerprint)) == (("prompt", "kind", "answer"), 64)
    assert facts.labels == {
        "math": LabelFacts(rows=2, example=f"{path}:1", without_reference=1, example_without=f"{path}:3"),
        "chat": LabelFacts(rows=1, example=f"{path}:2", without_reference=1, example_without=f"{path}:2"),
        "default": LabelFacts(rows=1, example=f"{path}:4", without_reference=0, example_without=None),
    }


def test_facts_go_through_json(write_jsonl: Write, tmp_path: Path) -> None:
    facts = scan([spec_of(write_jsonl(*TABLE))], cache_dir=tmp_path / "cache")
    assert from_data(DataFacts, json.loads(json.dumps(to_data(facts)))) == facts


@pytest.mark.parametrize(
    ("first", "limit", "rows", "complete"),
    [(None, None, 4, True), (2, None, 2, False), (4, None, 4, False), (5, None, 4, True), (None, 3, 3, True), (3, 3, 3, True), (2, 3, 2, False)],
)
def test_the_first_rows_are_not_the_whole(
    write_jsonl: Write, tmp_path: Path, first: int | None, limit: int | None, rows: int, complete: bool
) -> None:
    (facts,) = scan([spec_of(write_jsonl(*TABLE), limit=limit)], first=first, cache_dir=tmp_path / "cache").sets
    assert (facts.rows, facts.complete) == (rows, complete)


def test_a_python_source_is_scanned_and_not_cached(tmp_path: Path) -> None:
    (tmp_path / "scanned_source.py").write_text("def rows(n):\n    return [{'prompt': str(i), 'answer': i} for i in range(n)]\n")
    spec = DataSpec(name="made", python="scanned_source:rows", options={"n": 3}, label="math")
    (facts,) = scan([spec], (tmp_path,), cache_dir=tmp_path / "cache").sets
    assert (facts.origin, facts.rows, facts.bytes) == ("scanned_source:rows", 3, None)
    assert not (tmp_path / "cache").exists()


def test_a_row_that_cannot_be_used_is_found_by_the_scan(write_jsonl: Write, tmp_path: Path) -> None:
    path = write_jsonl({"prompt": "a", "ground_truth": "1"})
    with pytest.raises(UsageError, match="no column `answer`; it has: prompt, ground_truth"):
        scan([DataSpec(name="train", path=str(path), columns=Columns(reference="answer"))], cache_dir=tmp_path / "cache")


def test_an_unchanged_file_is_read_once(write_jsonl: Write, tmp_path: Path) -> None:
    path, cache = settled(write_jsonl(*TABLE)), tmp_path / "cache"
    before = scan([spec_of(path)], cache_dir=cache)
    (entry,) = cache.iterdir()
    marked = json.loads(entry.read_text()) | {"fingerprint": "from the cache"}
    entry.write_text(json.dumps(marked))
    assert scan([spec_of(path)], cache_dir=cache).sets[0].fingerprint == "from the cache"
    assert scan([spec_of(path, limit=4)], cache_dir=cache).sets[0].fingerprint == before.sets[0].fingerprint
    assert scan([spec_of(path)], first=9, cache_dir=cache) == before
    assert len(list(cache.iterdir())) == 3


def test_a_changed_file_is_read_again(write_jsonl: Write, tmp_path: Path) -> None:
    path, cache = settled(write_jsonl(*TABLE)), tmp_path / "cache"
    before = scan([spec_of(path)], cache_dir=cache).sets[0]
    path.write_text(path.read_text().replace('"a"', '"z"'))
    after = scan([spec_of(settled(path, 30.0))], cache_dir=cache).sets[0]
    assert (after.bytes, after.rows) == (before.bytes, before.rows)
    assert after.fingerprint != before.fingerprint


def test_a_file_written_just_now_is_not_cached(write_jsonl: Write, tmp_path: Path) -> None:
    scan([spec_of(write_jsonl(*TABLE))], cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": 3}', '{"labels": 3, "columns": []}', "null"])
def test_a_damaged_entry_is_replaced(write_jsonl: Write, tmp_path: Path, content: str) -> None:
    path, cache = settled(write_jsonl(*TABLE)), tmp_path / "cache"
    facts = scan([spec_of(path)], cache_dir=cache)
    (entry,) = cache.iterdir()
    entry.write_text(content)
    assert scan([spec_of(path)], cache_dir=cache) == facts
    assert json.loads(entry.read_text())["rows"] == 4


def test_a_cache_that_cannot_be_written_does_not_stop_a_scan(write_jsonl: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert scan([spec_of(settled(write_jsonl(*TABLE)))], cache_dir=tmp_path / "file" / "cache").sets[0].rows == 4


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, write_jsonl: Write, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    scan([spec_of(settled(write_jsonl(*TABLE)))])
    assert user_cache_dir() == tmp_path / "xdg" / "rft" / "data"
    assert len(list(user_cache_dir().iterdir())) == 1


@pytest.fixture
def facts(write_jsonl: Write, tmp_path: Path) -> DataFacts:
    return scan([spec_of(write_jsonl(*TABLE))], cache_dir=tmp_path / "cache")


def test_a_table_that_fits_has_no_problems(facts: DataFacts) -> None:
    assert label_problems(facts, ["math", "chat", "default"], ["default"]) == []


def test_a_label_without_an_entry(facts: DataFacts) -> None:
    math, default = label_problems(facts, ["maths", "chat"])[:2]
    path = facts.sets[0].origin
    assert (math.error, math.label) == (True, "math")
    assert math.message == f"data set `train`: 2 rows with the label `math` (first: {path}:1), and `rewards` has no entry for it and no `default`"
    assert math.hint == "did you mean `maths`? entries of `rewards`: `maths`, `chat`"
    assert (default.error, default.label) == (True, "default")
    assert default.message.startswith(f"data set `train`: 1 row with no label (first: {path}:4)")


def test_default_serves_labels_without_an_entry_and_says_so(facts: DataFacts) -> None:
    problems = label_problems(facts, ["math", "chatt", "default"])
    assert [(p.error, p.label) for p in problems] == [(False, "chat"), (False, "chatt")]
    assert "1 row with the label `chat`" in problems[0].message and "scored by `rewards.default`" in problems[0].message
    assert problems[0].hint == "did you mean `chatt`? "
    assert problems[1].message == "`rewards.chatt` is never used: no row has this label"


def test_an_entry_that_needs_a_reference(facts: DataFacts) -> None:
    (problem,) = label_problems(facts, ["math", "chat", "default"], ["math", "default"])
    assert problem.error
    assert problem.message == (
        f"data set `train`: 1 of 2 rows with the label `math` without a reference (first: {facts.sets[0].origin}:3), and `rewards.math` needs one"
    )
    assert problem.hint == "name its column with `columns.reference`; there is: prompt, kind, answer"


def test_default_passes_its_need_on(facts: DataFacts) -> None:
    errors = [problem.label for problem in label_problems(facts, ["math", "default"], ["default"]) if problem.error]
    assert errors == ["chat"]


def test_unused_entries_are_told_only_of_whole_sets(write_jsonl: Write, tmp_path: Path) -> None:
    spec = spec_of(write_jsonl(*TABLE))
    part = scan([spec], first=1, cache_dir=tmp_path / "cache")
    assert label_problems(part, ["math", "chat", "default"]) == []
    assert [p.label for p in label_problems(scan([spec], cache_dir=tmp_path / "cache"), ["math", "chat", "default", "code"])] == ["code"]


def test_every_set_is_looked_at(write_jsonl: Write, tmp_path: Path) -> None:
    train = write_jsonl({"prompt": "a"}, name="train.jsonl")
    held_out = write_jsonl({"prompt": "b"}, name="test.jsonl")
    specs = [DataSpec(name="train", path=str(train), label="math"), DataSpec(name="eval", path=str(held_out), label="mth")]
    problems = label_problems(scan(specs, cache_dir=tmp_path / "cache"), ["math"])
    assert [(problem.error, problem.label) for problem in problems] == [(True, "mth")]
    assert problems[0].message.startswith("data set `eval`: 1 row with the label `mth`")


def test_versions_of_packages_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["pydantic", "PyYAML", "typing-extensions", "torch", "math-verify", "no-such-package"]
    installed = [metadata.version(name) for name in names[:-1]]
    assert versions(names) == [*installed, None]
    (tmp_path / "Typing.Extensions-1.2.3.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing"), *sys.path])
    assert versions(names)[2] == "1.2.3"
