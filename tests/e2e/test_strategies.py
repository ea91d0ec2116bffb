"""Refill, replay, curriculum, best of n, a hot first token and a label of its own in one run: ended and resumed, on one rank and on two."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, steps, weights_equal, went_back

STRATEGIES = [
    *SMALL,
    *("--set", "rollout.dynamic={max_extra_rollouts: 2}", "--set", "rollout.replay={after_steps: 1}", "--set", "rollout.keep={best: 1, worst: 1}"),
    *("--set", "rollout.first_token_temperature=2.0", "--set", "data.curriculum={range: [0.2, 1.0], share: 0.0}", "--set", "data.train.limit=12"),
    *("--set", "eval={before_training: false, at_end: false}", "--set", "rollout.max_new_tokens=24"),
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    result = Command(folder, "train", "quickstart", "--ranks", "2", "--run-dir", "run", *STRATEGIES).wait()
    assert result.code == 0, result
    return folder / "run"


def samples(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def test_every_strategy_had_something_to_do(straight: Path) -> None:
    told = steps(straight)
    assert sum(step["dynamic"]["groups_rejected"] for step in told.values()) > 0
    assert sum(step["replay"]["came_back"] for step in told.values()) > 0
    assert sum(step["curriculum"]["passed_over"] for step in told.values()) > 0
    assert all(step["groups"] == 8 and len(samples(straight, number)) == 32 for number, step in told.items())
    assert told[1]["sampler_logprob_gap"]["mean"] < 1e-5  # trainer and engine mean the same first token
    draws = [line["draw"] for number in told for line in samples(straight, number) if line["sample"] == 0]
    assert len(set(draws)) == len(draws)


def test_ended_and_resumed(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    run = tmp_path / "run"
    went_back(straight, run, 2)
    resumed = rft("resume", "run").wait()
    assert resumed.code == 0, resumed
    assert steps(run) == steps(straight) and weights_equal(run / "final", straight / "final")
    assert all(samples(run, step) == samples(straight, step) for step in range(1, 5))


def test_one_rank_trains_on_the_same_groups(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *STRATEGIES, "--set", "train.steps=1").wait()
    assert result.code == 0, result
    run = tmp_path / "run"
    assert samples(run, 1) == samples(straight, 1)
    one, two = steps(run)[1], steps(straight)[1]
    assert all(one[name] == two[name] for name in ("dynamic", "replay", "curriculum", "keep"))
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
