"""Completions on disk, chosen, sorted and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftcli.errors import UsageError
from rftcli.observe.sample_view import chosen, fields, plain, read_lines, samples_file, steps_on_disk


def line(sample: int, reward: float | None = 0.5, **fields: Any) -> dict[str, Any]:
    return {
        "draw": 3, "sample": sample, "label": "math", "prompt": "2+2=", "completion": f"it is {sample}", "reference": "4", "reward": reward,
        "parts": {"right": {"value": reward, "weight": 1.0}}, "advantage": None, "tokens": 10 - sample, "finish": "stop", "media": [], **fields,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("samples/step_000002.jsonl", "samples/step_000010.jsonl", "evals/step_000004.samples.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line(i)) + "\n" for i in range(3)) + '{"torn": ')
    (tmp_path / "samples" / ".step_000011.jsonl.0").write_text("{}\n")
    (tmp_path / "evals" / "step_000004.json").write_text("{}")
    return tmp_path


def test_the_newest_file_unless_a_step_is_named(run: Path) -> None:
    assert list(steps_on_disk(run, evals=False)) == [2, 10]
    assert samples_file(run, step=None, evals=False).name == "step_000010.jsonl"
    assert samples_file(run, step=2, evals=False).name == "step_000002.jsonl"
    assert samples_file(run, step=None, evals=True).name == "step_000004.samples.jsonl"
    with pytest.raises(UsageError, match="no samples of step 3") as caught:
        samples_file(run, step=3, evals=False)
    assert caught.value.hint == "steps with some: 2, 10"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no samples"):
        samples_file(tmp_path, step=None, evals=False)


def test_lines_that_are_whole_and_wanted(run: Path) -> None:
    path = run / "samples" / "step_000002.jsonl"
    assert [item["sample"] for item in read_lines(path, lambda item: item["sample"] > 0)] == [1, 2]


@pytest.mark.parametrize(
    ("sort", "count", "order"),
    [
        (None, None, [0, 1, 2, 3]),
        ("reward", None, [2, 0, 1, 3]),
        ("-reward", None, [1, 0, 2, 3]),
        ("-reward", 1, [1]),
        ("length", 2, [3, 2]),
        ("-length", None, [0, 1, 2, 3]),
        ("advantage", None, [0, 1, 2, 3]),
    ],
)
def test_order(sort: str | None, count: int | None, order: list[int]) -> None:
    """Without a reward: at the end, either way."""
    lines = [line(0, 0.5), line(1, 1.0), line(2, -1.0), line(3, None)]
    assert [item["sample"] for item in chosen(lines, sort=sort, count=count)] == order


def test_an_unknown_order() -> None:
    with pytest.raises(UsageError, match="--sort size is unknown"):
        chosen([line(0)], sort="size", count=None)


def test_as_text() -> None:
    shown = plain(line(1, 0.25, advantage=1.5, answer="4", set="test", completion="a\nb\x1b[2J\u202e"))
    assert shown.splitlines()[0] == "--- draw 3 sample 1 | set test | label math | reward 0.250 | advantage 1.50 | 9 tokens, stop | answer 4"
    assert shown.splitlines()[1] == "parts       right 0.250"
    assert "completion  a\n            b\ufffd" in shown and "\x1b" not in shown
    failed = plain(line(1, None, parts={"right": {"value": None, "weight": 1.0, "error": "gone"}, "other": {"value": None, "weight": 1.0}}))
    assert "no reward" in failed and "right error: gone, other abstained" in failed


def test_what_rewards_logged_is_shown() -> None:
    line = {"prompt": "p", "completion": "c", "metrics": [["s/length", 2.0]], "extra": {"s/verdict": "is\x1b[31m fine", "level": 3}}
    assert dict(fields(line))["logged"] == "s/length 2.00, s/verdict is fine, level 3"
    assert "logged" not in dict(fields({"prompt": "p", "completion": "c"}))
