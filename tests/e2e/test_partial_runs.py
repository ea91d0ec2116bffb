"""Partial rollouts in whole runs: answers go on under newer weights, nothing is lost, and a run that was ended goes on with what ranks had kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, steps, weights_equal, went_back

PARTIAL = [
    *SMALL,
    *("--set", "rollout={max_new_tokens: 24, partial: {budget_tokens: 8}, max_version_lag: 3}", "--set", "algorithm.loss.old=sampler"),
    *("--set", "eval={before_training: false, at_end: false}", "--set", "train.optimizer.lr=0.003"),
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    result = Command(folder, "train", "quickstart", "--ranks", "2", "--run-dir", "run", *PARTIAL).wait()
    assert result.code == 0, result
    return folder / "run"


def samples(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def test_answers_go_on_under_newer_weights(straight: Path) -> None:
    """Each step trains on whole groups of its size, no draw twice; the engine is compared with the trainer on new tokens alone, and agrees."""
    told, lines = steps(straight), [line for step in range(1, 5) for line in samples(straight, step)]
    assert all(step["groups"] == 8 and step["partial"]["groups_dropped"] == 0 for step in told.values())
    assert len({line["draw"] for line in lines}) == 8 * 4 and len(lines) == 8 * 4 * 4
    late = [line for line in lines if "segments" in line]
    assert late and all(line["segments"][0][0] == 0 and line["segments"][0][1] < line["segments"][-1][1] < line["step"] for line in late)
    assert max(step["version_lag"]["max"] for step in told.values()) in (1, 2, 3) and told[1]["version_lag"] == {"mean": 0.0, "max": 0}
    compared = [step["sampler_logprob_gap"]["mean"] for step in told.values() if "sampler_logprob_gap" in step]
    assert compared and max(compared) < 1e-5
    assert max(step["ratio_max"] for step in told.values()) > 1.001  # old tokens have a ratio of their own


def test_ended_and_resumed(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    run = tmp_path / "run"
    went_back(straight, run, 2)
    progress = json.loads((run / "checkpoints" / "step_000002" / "progress.json").read_text())
    assert len(progress["state"]["partial"]["ranks"]) == 2 and progress["state"]["partial"]["ranks"] != ["[]"] * 2
    resumed = rft("resume", "run").wait()
    assert resumed.code == 0, resumed
    assert steps(run) == steps(straight) and weights_equal(run / "final", straight / "final")
    assert all(samples(run, step) == samples(straight, step) for step in range(1, 5))
