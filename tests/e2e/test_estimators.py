"""A run with a greedy twin, a teacher and two ranks: what its steps say, and the same bits after a stop."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Command, arguments, steps, weights_equal, went_back

SETTINGS = {
    "batch.prompts_per_step": "4",
    "rollout.samples_per_prompt": "2",
    "checkpoint.every": "1",
    "data.eval": "null",
    "algorithm.advantage": "{kind: remax, distill_coefficient: 0.5}",
    "models.teacher.path": "builtin:quickstart",
}


def test_remax_and_a_teacher_over_a_stop(rft: Callable[..., Command], tmp_path: Path) -> None:
    settings = arguments(SETTINGS)
    straight = rft("train", "quickstart", "--ranks", "2", "--run-dir", "straight", "--set", "train.steps=2", *settings).wait()
    assert straight.code == 0, straight
    first, second = (steps(tmp_path / "straight")[number] for number in (1, 2))
    assert first["teacher_kl"] == pytest.approx(0.0, abs=1e-6)  # the policy is still the teacher
    assert second["teacher_kl"] != first["teacher_kl"]
    for step in (first, second):
        assert 0.0 <= step["greedy_reward_mean"] <= 1.0 and step["greedy_dropped"] == 0.0
    for number in (1, 2):  # the twins are in no file of trained completions
        lines = (tmp_path / "straight" / "samples" / f"step_{number:06}.jsonl").read_text().splitlines()
        assert [json.loads(line)["sample"] for line in lines] == [0, 1] * 4
    went_back(tmp_path / "straight", tmp_path / "stopped", 1)
    resumed = rft("resume", "stopped").wait()
    assert resumed.code == 0, resumed
    assert steps(tmp_path / "stopped") == steps(tmp_path / "straight")
    assert weights_equal(tmp_path / "stopped" / "final", tmp_path / "straight" / "final")
