"""Sets of other formats, filtered, streamed and cut, through whole runs."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets

from tests.e2e.conftest import SMALL, TIMES, events, state

RECIPE = """\
extends: quickstart
name: mixed
data:
  seed: 11
  overlong_prompt: drop
  train:
    - {name: packed, path: rows.jsonl.gz, streaming: true, where: "level >= 3 and kind == 'sum'", template: '{left}+{right}=', weight: 2}
    - {name: table, path: rows.csv, columns: {prompt: question}}
    - {name: saved, path: folder, split: train}
  eval:
    held_out: {path: folder, split: test}
"""


def make_data(folder: Path) -> None:
    rows = [
        {"left": n, "right": 11, "answer": f"{n}+11\n#### {n + 11}", "level": n % 5, "kind": "sum" if n % 2 else "none"} for n in range(10, 90)
    ]
    with gzip.open(folder / "rows.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\r\n" for row in rows))
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("question", "answer"), *((f"{n}+12=", str(n + 12)) for n in range(10, 30)), ("1+" * 30 + "1=", "31")])
    saved = datasets.Dataset.from_list([{"prompt": f"{n}+13=", "answer": str(n + 13)} for n in range(10, 20)])
    datasets.DatasetDict({"train": saved, "test": saved.select([0, 1])}).save_to_disk(folder / "folder")


def test_a_mixture_of_formats_resumes_exactly(rft: Callable, tmp_path: Path) -> None:
    """Steps 3 and 4 after a resume are the steps 3 and 4 of the run that was not interrupted: the same rows, the same numbers."""
    make_data(tmp_path)
    (tmp_path / "mixed.yaml").write_text(RECIPE)
    planned = rft("plan", "mixed.yaml", "--ranks", "2", *SMALL).wait()
    assert planned.code == 0 and "table" in planned.out and "1 (drop)" in planned.out, planned
    assert "`table`: 1 of the 21 prompts are longer than 24 tokens and are dropped" in planned.err
    assert "are trained on, by 2 of 10 rows of the training set `saved`" in planned.err
    run = tmp_path / "run"
    result = rft("train", "mixed.yaml", "--ranks", "2", "--run-dir", str(run), *SMALL).wait()
    assert result.code == 0, result
    straight = {step: (run / "samples" / f"step_{step:06d}.jsonl").read_text() for step in (3, 4)}
    assert rft("resume", str(run), "--step", "2").wait().code == 0
    assert state(run)["status"] == "done"
    by_attempt = {attempt: {} for attempt in (1, 2)}
    for event in events(run, "step"):
        by_attempt[event["attempt"]][event["step"]] = {key: value for key, value in event.items() if key not in TIMES}
    assert sorted(by_attempt[2]) == [3, 4] and all(by_attempt[1][step] == by_attempt[2][step] for step in (3, 4))
    drawn = []
    for step in (3, 4):
        text = (run / "samples" / f"step_{step:06d}.jsonl").read_text()
        assert text == straight[step]
        drawn += [json.loads(line) for line in text.splitlines()]
    ids = {line["prompt_id"].partition(":")[0] for line in drawn}
    assert ids == {"packed", "table", "saved"}
    packed = [line["prompt"] for line in drawn if line["prompt_id"].startswith("packed")]
    assert all(text.endswith("+11=") for text in packed)
