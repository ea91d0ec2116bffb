"""Every estimator learns the quickstart's task: the measured settings of docs/algorithms.md, held-out accuracy before and after."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Command, Result, events, steps

PATIENCE_SECONDS = 3600
"""A minute on two free cores; far more on machines that are busy."""
SETTINGS = {
    "grpo": [],
    "rloo": ["algorithm.advantage.kind=rloo"],
    "reinforce": ["algorithm.advantage={kind: reinforce, whiten: all}"],
    "gae": ["algorithm.advantage.kind=gae", "models.critic={optimizer: {lr: 1e-3}}"],
}
COMMON = ["batch.prompts_per_step=16", "train.steps=24", "checkpoint.every=0", "data.eval.held_out.limit=128"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_an_estimator_learns(tmp_path: Path, kind: str) -> None:
    sets = [item for text in (*COMMON, *SETTINGS[kind]) for item in ("--set", text)]
    command = Command(tmp_path, "train", "quickstart", "--ranks", "1", "--run-dir", "run", *sets)
    result = Result(command.process.wait(PATIENCE_SECONDS), *command.process.communicate())
    assert result.code == 0, result
    before, after = (event["sets"]["held_out"]["mean@1"]["value"] for event in events(tmp_path / "run", "eval"))
    assert before < 0.25 and after > 0.9, (before, after)
    rewards = [step["reward_mean"] for _, step in sorted(steps(tmp_path / "run").items())]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    if kind == "gae":
        losses = [step["value_loss"] for _, step in sorted(steps(tmp_path / "run").items())]
        assert sum(losses[-5:]) < sum(losses[:5])  # the critic has learned something too
