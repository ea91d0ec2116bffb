"""Every preset learns the quickstart's task: as it is shipped, on top of the quickstart, with what it leaves to the user."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Command, Result, arguments, steps

from rftcli.recipe.layers import preset_names, shipped_recipes

PATIENCE_SECONDS = 3600
"""A minute or two on two free cores; far more on machines that are busy."""
COMMON = {
    **{"batch.prompts_per_step": "16", "train.steps": "24", "checkpoint.every": "0"},
    **{"eval.before_training": "false", "data.eval.held_out.limit": "16"},
}
ALONE = {"batch.prompts_per_step": "128"}
"""With one answer a prompt, as many answers a step as the others have."""
NEEDS = {
    "ppo": {**ALONE, "models.critic": "{optimizer: {lr: 1e-3}}"},
    "reinforce_pp": ALONE,
    "remax": ALONE,
    "distill": {"models.teacher.path": "teacher/checkpoints/step_000024/policy"},
}
"""Preset -> what it leaves to the user."""
PRESETS = preset_names(shipped_recipes())


def train(folder: Path, preset: str, run: str, settings: dict[str, str]) -> list[float]:
    """Train on top of the quickstart; the mean reward of each step."""
    (folder / f"{run}.yaml").write_text(f"extends: [quickstart, presets/{preset}]\n", encoding="utf-8")
    command = Command(folder, "train", f"{run}.yaml", "--ranks", "1", "--run-dir", run, *arguments({**COMMON, **settings}))
    result = Result(command.process.wait(PATIENCE_SECONDS), *command.process.communicate())
    assert result.code == 0, result
    return [step["reward_mean"] for _, step in sorted(steps(folder / run).items())]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_learns(tmp_path: Path, preset: str) -> None:
    """The mean reward of the last five steps is well above that of the first five; distill has a teacher that has learned the task before."""
    if preset == "distill":
        train(tmp_path, "grpo", "teacher", {})
    rewards = train(tmp_path, preset, "run", NEEDS.get(preset, {}))
    assert len(rewards) == 24
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards
