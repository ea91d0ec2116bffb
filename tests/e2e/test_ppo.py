"""A whole PPO run: critic, adaptive KL in the reward, known answers beside it, the policy frozen at first; stopped and resumed bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, steps, weights_equal, went_back

SETS = {
    "algorithm.advantage": "{kind: gae, lam: 0.95}",
    "models.critic": "{optimizer: {lr: 1e-3}, warmup_steps: 2}",
    "algorithm.kl": "{coefficient: 0.05, estimator: k1, place: reward, controller: {kind: adaptive, target: 0.001, horizon: 200}}",
    "train.supervised": "{data: {path: answers.jsonl}, rows_per_update: 3}",
    "train.freeze_policy_steps": "1",
    "batch.updates_per_step": "2",
    "data.eval": "null",
    "rollout.samples_per_prompt": "1",
    "batch.prompts_per_step": "16",
}
PPO = [*SMALL, *(item for key, value in SETS.items() for item in ("--set", f"{key}={value}"))]


def write_answers(folder: Path) -> None:
    rows = [{"prompt": f"Q: {n}+1\nA:", "completion": f" {n}+1={n + 1} #### {n + 1}"} for n in range(5)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    write_answers(folder)
    settings = [item.replace("answers.jsonl", str(folder / "answers.jsonl")) for item in PPO]
    result = Command(folder, "train", "quickstart", "--ranks", "2", "--run-dir", "run", *settings).wait()
    assert result.code == 0, result
    return folder / "run"


def test_what_a_step_says(straight: Path) -> None:
    first, *others = (steps(straight)[number] for number in (1, 2, 3, 4))
    both = {"value_loss", "value_mean", "return_mean", "critic_lr", "critic_grad_norm", "kl", "kl_coefficient", "advantage_min", "advantage_max"}
    policys = {"ptx_loss", "loss", "policy_loss", "kl_update", "lr", "grad_norm", "ratio_max"}
    assert both <= set(first) and not policys & set(first)  # only the critic learns: what does not apply is absent
    assert first["policy_version"] == 0 and first["kl_coefficient"] == 0.05 and first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["advantage_min"] < 0 < first["advantage_max"]
    for number, step in enumerate(others, start=1):
        assert both | policys <= set(step)
        assert step["policy_version"] == 2 * number and step["ptx_loss"] > 0 and step["kl_update"] >= 0
    assert [first["critic_lr"], others[0]["critic_lr"]] == pytest.approx([5e-4, 1e-3])
    assert others[0]["kl_coefficient"] == 0.05  # no controller before the policy moved
    assert others[1]["kl_coefficient"] == pytest.approx(0.05 * (1 - 0.2 * 16 / 200))


def test_a_checkpoint_holds_a_critic_that_loads(straight: Path) -> None:
    import torch
    from transformers import AutoModelForTokenClassification

    folder = straight / "checkpoints" / "step_000004"
    critic = AutoModelForTokenClassification.from_pretrained(folder / "critic")
    assert critic.config.num_labels == 1 and bool(critic.score.weight.any()) and (folder / "critic" / "tokenizer_config.json").is_file()
    ids = torch.tensor([[1, 5, 9]])
    assert critic(input_ids=ids).logits.shape == (1, 3, 1)
    assert not weights_equal(straight / "checkpoints" / "step_000001" / "critic", folder / "critic")


def test_the_policy_stood_still(straight: Path) -> None:
    """Exactly one step: the first checkpoint holds the policy as it was given."""
    from safetensors.torch import load_file

    from rftcli.builtin import builtin_path

    given = load_file(Path(builtin_path("quickstart")) / "model.safetensors")
    first, second = (load_file(straight / "checkpoints" / f"step_00000{n}" / "policy" / "model.safetensors") for n in (1, 2))
    assert all(bool((given[name].float() == first[name].float()).all()) for name in given)
    assert any(bool((first[name] != second[name]).any()) for name in first)


def test_resumed_bit_for_bit(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    """From the checkpoint after step 2: critic, controller and stream go on where they were."""
    run = tmp_path / "run"
    went_back(straight, run, 2)
    result = rft("resume", "run").wait()
    assert result.code == 0, result
    assert steps(run) == steps(straight)
    assert weights_equal(run / "final", straight / "final")
    ends = [folder / "checkpoints" / "step_000004" for folder in (run, straight)]
    assert weights_equal(ends[0] / "critic", ends[1] / "critic")
    progress = [json.loads((end / "progress.json").read_text())["state"] for end in ends]
    assert progress[0] == progress[1] and {"critic", "kl", "supervised"} <= set(progress[0])
    assert progress[0]["supervised"]["next_row"] == 3 * 2 * 3


def test_what_cannot_run_is_said_before_anything_starts(rft: Callable[..., Command]) -> None:
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", "--set", "models.policy.router_loss=0.1").wait()
    assert result.code == 2 and "the model has no router" in result.err and "router_loss" in result.err
    missing = "train.supervised={data: {path: nowhere.jsonl}}"
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", "--set", missing).wait()
    assert result.code == 2 and "train.supervised.data.path" in result.err
