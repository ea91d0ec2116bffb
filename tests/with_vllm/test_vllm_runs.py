"""Whole runs with vLLM in two ranks: they learn, engine and trainer agree, weights move, a killed run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_runs import steps, versions

Rft = Callable[..., tuple[int, str]]
LIMIT_SECONDS = 240
SMALL = (
    "--ranks", "2", "--set", "rollout.engine=vllm", "--set", "rollout.vllm.check_weights=true", "--set", "data.eval.held_out.limit=8",
    "--set", "batch.prompts_per_step=8", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=10",
)  # fmt: skip


@pytest.mark.parametrize("more", [
    (), ("train.deepspeed.zero_stage=3",), ("models.policy={path: 'builtin:quickstart', lora: {rank: 4}, dtype: bfloat16}",),
    ("models.policy={path: 'builtin:quickstart', lora: {rank: 4}, dtype: bfloat16}", "rollout.vllm.lora=adapter", "train.deepspeed.zero_stage=3"),
], ids=["plain", "zero-3", "lora", "adapter"])
def test_weights_move_and_log_probs_agree(rft: Rft, tmp_path: Path, more: tuple[str, ...]) -> None:
    sets = [item for text in more for item in ("--set", text)]
    code, said = rft("train", "quickstart", *SMALL, *sets, "--set", "train.steps=2", "--run-dir", "out")
    assert code == 0, said
    found = steps(tmp_path / "out")
    assert found[1]["sampler_logprob_gap"]["mean"] < (0.05 if "bfloat16" in str(more) else 1e-5) and "sampler_logprob_gap" not in found[2]
    assert "engine against trainer: log-probs differ by" in (tmp_path / "out" / "events.jsonl").read_text()
    assert [versions(tmp_path / "out", step) for step in (1, 2)] == [{0}, {1}]


def test_a_run_goes_on_from_its_checkpoint(rft: Rft, tmp_path: Path) -> None:
    """Not bit for bit, as with the engine hf: the same weights, the same data, other samples perhaps."""
    code, said = rft("train", "quickstart", *SMALL, "--set", "train.steps=2", "--run-dir", "out")
    assert code == 0, said
    code, said = rft("resume", "out", "--set", "train.steps=3")
    assert code == 0, said
    assert set(steps(tmp_path / "out")) == {1, 2, 3}
    code, said = rft("eval", "out")
    assert code == 0 and "held_out" in said, said


def test_answers_go_on_under_newer_weights(rft: Rft, tmp_path: Path) -> None:
    partial = ("rollout={partial: {budget_tokens: 8}, max_version_lag: 2}", "algorithm.loss.old=sampler", "train.steps=3")
    code, said = rft("train", "quickstart", *SMALL, *(item for text in partial for item in ("--set", text)), "--run-dir", "out")
    assert code == 0, said
    found = steps(tmp_path / "out")
    assert all(step["groups"] == 8 and step["version_lag"]["max"] <= 2 for step in found.values()) and found[3]["version_lag"]["max"] > 0
    gaps = [step["sampler_logprob_gap"]["mean"] for step in found.values() if "sampler_logprob_gap" in step]
    assert gaps and max(gaps) < 1e-5
    lines = [json.loads(line) for step in found for line in (tmp_path / "out" / "samples" / f"step_00000{step}.jsonl").read_text().splitlines()]
    assert any(len(line.get("segments", ())) > 1 for line in lines)


def test_a_killed_run_goes_on(rft: Rft, tmp_path: Path, environment: dict[str, str]) -> None:
    """Every rank is killed in the middle of a step; nothing of the engine has to be saved."""
    command = [sys.executable, "-m", "rftcli", "train", "quickstart", *SMALL, "--set", "train.steps=6", "--run-dir", "out"]
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = tmp_path / "out"
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (run / "checkpoints" / "step_000002" / "COMMITTED").is_file():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    for path in (run / "attempts" / "1" / "ranks").glob("rank_?.json"):
        os.kill(int(json.loads(path.read_text())["pid"]), signal.SIGKILL)
    assert running.wait(timeout=60) == 1
    code, said = rft("resume", "out")
    assert code == 0, said
    assert set(steps(run)) == set(range(1, 7))


@pytest.mark.slow
def test_the_quickstart_learns(rft: Rft, tmp_path: Path) -> None:
    code, said = rft("train", "quickstart", "--ranks", "2", "--set", "rollout.engine=vllm", "--set", "train.steps=20", "--run-dir", "out")
    assert code == 0, said
    rewards = [step["reward_mean"] for step in steps(tmp_path / "out").values()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


@pytest.mark.slow
def test_smollm2(rft: Rft, tmp_path: Path) -> None:
    sets = (
        "batch.prompts_per_step=2", "rollout.samples_per_prompt=4", "train.steps=2", "data.eval={}", "models.policy.dtype=bfloat16",
        "checkpoint.every=0",
    )  # fmt: skip
    code, said = rft("train", "smollm2-chain-sum", *SMALL[:6], *(item for text in sets for item in ("--set", text)), "--run-dir", "out")
    assert code == 0, said
    assert steps(tmp_path / "out")[1]["sampler_logprob_gap"]["mean"] < 0.05
