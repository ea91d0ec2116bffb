"""Two sample files, prompt by prompt; other prompts are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftcli.errors import UsageError
from rftcli.runtime.compare import Other, compare, other_of, text


def write(path: Path, rewards: dict[int, list[float | None]], *, name: str = "test", prompt: str = "Q{}", reverse: bool = False) -> Path:
    lines: list[dict[str, Any]] = [
        {"set": name, "draw": draw, "sample": i, "prompt_id": f"test:{draw}", "prompt": prompt.format(draw), "reference": str(draw), "reward": reward}
        for draw, values in rewards.items()
        for i, reward in enumerate(values)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in (reversed(lines) if reverse else lines)))
    return path


def test_zero_one_rewards_give_mcnemars_test(tmp_path: Path) -> None:
    """Of eight prompts six differ, all for the better: p = 2 / 2^6."""
    one = write(tmp_path / "a", {draw: [float(draw < 7)] for draw in range(8)})
    two = write(tmp_path / "b", {draw: [float(draw == 0)] for draw in range(8)}, reverse=True)
    found = compare(one, two, names=("a", "b"), seed=0)
    assert found["sets"]["test"] | {"low": 0, "high": 0} == {
        "prompts": 8, "left_out": 0, "pairs": 8, "first": 0.875, "second": 0.125, "difference": 0.75, "low": 0, "high": 0, "better": 6, "worse": 0,
        "same": 2, "sign_p": 0.03125, "permutation_p": 0.03125, "permutation_exact": True, "zero_one": True,
    }  # fmt: skip
    assert "McNemar" in text(found) and "difference +0.7500" in text(found)


def test_samples_of_a_prompt_are_one_value(tmp_path: Path) -> None:
    one = write(tmp_path / "a", {0: [1.0, 0.0, None], 1: [0.5], 2: [None]})
    two = write(tmp_path / "b", {0: [0.0, 0.0], 1: [0.0], 2: [1.0]})
    found = compare(one, two, names=("a", "b"), seed=0)["sets"]["test"]
    assert (found["prompts"], found["left_out"], found["pairs"], found["difference"]) == (3, 1, 2, 0.5)
    assert not found["zero_one"]


def test_nothing_scored(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {0: [None]})
    found = compare(path, path, names=("a", "b"), seed=0)
    assert found["sets"]["test"] == {"prompts": 1, "left_out": 1} and "no prompt" in text(found)


@pytest.mark.parametrize("change", [{"prompt": "P{}"}, {"rewards": {0: [1.0]}}, {"name": "other"}])
def test_other_prompts_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    rewards: dict[int, list[float | None]] = {0: [1.0], 1: [0.0]}
    one = write(tmp_path / "a", rewards)
    two = write(tmp_path / "b", change.pop("rewards", rewards), **change)
    with pytest.raises(UsageError, match=r"the prompts are not the same|other sets"):
        compare(one, two, names=("a", "b"), seed=0)


def test_what_may_be_compared_with(tmp_path: Path) -> None:
    assert other_of("base") == Other(what="the untrained model")
    assert other_of("quickstart").given == "builtin:quickstart"
    folder = tmp_path / "evaluated"
    (folder / "evals").mkdir(parents=True)
    samples = write(folder / "evals" / "step_000004.samples.jsonl", {0: [1.0]})
    assert other_of(str(folder)).samples == samples
    for word in (tmp_path, tmp_path / "nothing.yaml"):
        with pytest.raises(UsageError):
            other_of(str(word))
