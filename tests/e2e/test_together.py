"""Features that meet: each works alone elsewhere, and these runs have two at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, arguments, events, steps, weights_equal, went_back

OWN_REWARDS = "[{rule: exact, options: {after: '####'}, weight: 2}]"
"""Full marks are 2 in evaluation and 1 in training."""


def sampled(path: Path) -> list[dict[str, Any]]:
    """Without the version, which counts the updates of a run and starts at 0 in an evaluation of its own."""
    return [{**json.loads(line), "policy_version": None} for line in path.read_text().splitlines()]


def test_the_running_mean_is_scored_by_the_evaluations_own_rewards(rft: Callable[..., Command], tmp_path: Path) -> None:
    """`NAME@ema` beside `NAME`, both by eval.rewards; the live weights go on as if nothing had been evaluated."""
    sets = {"models.policy.ema": "{decay: 0.5, evaluate: true}", "train.steps": "2", "train.optimizer.lr": "1e-3"}
    watched = {**sets, "eval.every": "1", "eval.rewards.default": OWN_REWARDS}
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, *arguments(watched)).wait()
    assert result.code == 0, result
    for event in events(tmp_path / "run", "eval"):
        assert set(event["sets"]) == {"held_out", "held_out@ema"}
        for found in event["sets"].values():
            assert found["mean@1"]["value"] == pytest.approx(2 * found["pass@1"]["value"])  # 2 is the full mark
        lines = sampled(tmp_path / "run" / "evals" / f"step_{event['step']:06d}.samples.jsonl")
        assert {(line["set"], line["reward"]) for line in lines} <= {(name, mark) for name in event["sets"] for mark in (0.0, 2.0)}
        assert all(part["weight"] == 2 for line in lines for part in line["parts"].values())
    plain = rft("train", "quickstart", "--ranks", "2", "--run-dir", "plain", *SMALL, *arguments({**sets, "data.eval": "null"})).wait()
    assert plain.code == 0 and steps(tmp_path / "run") == steps(tmp_path / "plain"), plain


def test_a_checkpoint_is_evaluated_by_its_running_mean(rft: Callable[..., Command], tmp_path: Path) -> None:
    """eval.weights: ema, in the run and by `rft eval` of its checkpoint: the same answers, which are not those of the live weights."""
    sets = {"models.policy.ema": "{decay: 0.5}", "train.steps": "2", "train.optimizer.lr": "1e-2", "eval.weights": "ema"}
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *SMALL, *arguments(sets)).wait()
    assert result.code == 0, result
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    assert not weights_equal(checkpoint / "ema", checkpoint / "policy")
    result = rft("eval", "run", "--ranks", "2", "--run-dir", "again").wait()
    assert result.code == 0, result
    (again,) = events(tmp_path / "again", "eval")
    assert again["sets"] == events(tmp_path / "run", "eval")[-1]["sets"]
    name = "step_000002.samples.jsonl"
    assert sampled(tmp_path / "again" / "evals" / name) == sampled(tmp_path / "run" / "evals" / name)
    live = rft("eval", "quickstart", "--ranks", "1", "--run-dir", "live", *SMALL, "--set", f"models.policy.path={checkpoint / 'policy'}").wait()
    assert live.code == 0, live
    answers = [{line["completion"] for line in sampled(path)} for path in (tmp_path / "live").rglob("*.samples.jsonl")]
    assert answers != [{line["completion"] for line in sampled(tmp_path / "again" / "evals" / name)}]


def test_an_untrained_adapter_changes_no_evaluation(rft: Callable[..., Command], tmp_path: Path) -> None:
    """`rft eval RECIPE` with LoRA and without: an adapter that has learnt nothing answers as its base does."""
    found = {}
    for name, sets in {"plain": {}, "adapted": {"models.policy.lora": "{rank: 4}"}}.items():
        result = rft("eval", "quickstart", "--ranks", "1", "--run-dir", name, *SMALL, *arguments(sets)).wait()
        assert result.code == 0, result
        found[name] = sampled(next((tmp_path / name / "evals").glob("*.samples.jsonl")))
    assert found["plain"] == found["adapted"] and len(found["plain"]) == 16
    assert any("LoRA" in event["text"] for event in events(tmp_path / "adapted", "log"))


@pytest.mark.slow
def test_weights_alone_bring_the_critic_along(rft: Callable[..., Command], tmp_path: Path) -> None:
    """Without the trainer's state a run goes on, when asked, from the policy and the critic of its checkpoint: the same answers, and the same
    values of them, as in the run that went straight on. More steps keep the critic's schedule."""
    sets = {
        "algorithm.advantage": "{kind: gae, lam: 0.95}", "models.critic": "{optimizer: {lr: 1e-3, schedule: linear}}", "data.eval": "null",
        "checkpoint.trainer_state": "false", "train.steps": "3", "algorithm.kl.coefficient": "0.05",
    }  # fmt: skip
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "first", *SMALL, *arguments(sets)).wait()
    assert result.code == 0, result
    run, first = tmp_path / "run", tmp_path / "first"
    straight, first_samples = steps(first)[3], (first / "samples" / "step_000003.jsonl").read_text()
    went_back(first, run, 2)
    refused = rft("resume", "run").wait()
    assert refused.code == 4 and "no trainer state" in refused.err, refused
    result = rft("resume", "run", "--accept", "--set", "train.steps=4").wait()
    assert result.code == 0 and "critic.learner" not in result.out, result
    again = steps(run)[3]
    assert again["value_mean"] == straight["value_mean"] != 0.0
    assert again["kl"] == straight["kl"] > 0  # the reference is the model before training, not the checkpoint
    assert (run / "samples" / "step_000003.jsonl").read_text() == first_samples
    assert not weights_equal(run / "checkpoints" / "step_000004" / "critic", run / "checkpoints" / "step_000002" / "critic")


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_adapter_over_quantised_weights_on_two_ranks(rft: Callable[..., Command], tmp_path: Path, stage: int) -> None:
    """Trained, stopped after the first of two steps and resumed bit for bit, its checkpoint evaluated."""
    sets = {
        "models.policy": "{path: 'builtin:quickstart', quantise: {bits: 4}, lora: {rank: 4, alpha: 8}, dtype: bfloat16}", "train.steps": "2",
        "train.deepspeed.zero_stage": str(stage), "algorithm.kl.coefficient": "0.05", "train.optimizer.lr": "1e-2",
    }  # fmt: skip
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "straight", *SMALL, *arguments(sets)).wait()
    assert result.code == 0, result
    run, straight = tmp_path / "run", tmp_path / "straight"
    assert steps(straight)[1]["kl"] == 0.0 < steps(straight)[2]["kl"] and steps(straight)[1]["grad_norm"] > 0
    went_back(straight, run, 1)
    result = rft("resume", "run").wait()
    assert result.code == 0, result
    assert steps(run) == steps(straight) and weights_equal(run / "final", straight / "final")
    result = rft("eval", "run", "--ranks", "1", "--run-dir", "eval").wait()
    assert result.code == 0 and events(tmp_path / "eval", "eval")[0]["sets"]["held_out"]["prompts"] == 16, result
