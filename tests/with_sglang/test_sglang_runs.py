"""A whole run with SGLang: engine and trainer agree, weights move, it goes on from a checkpoint, and nothing of the engine is left behind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from engine_runs import steps, versions

SMALL = (
    "--ranks", "1", "--set", "rollout.engine=sglang", "--set", "rollout.sglang.check_weights=true", "--set", "data.eval.held_out.limit=8",
    "--set", "batch.prompts_per_step=8", "--set", "checkpoint.every=1", "--set", "rollout.sglang.options={log_level: warning}",
)  # fmt: skip


def test_it_trains_and_goes_on(rft: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    run = tmp_path / "out"
    code, said = rft("train", "quickstart", *SMALL, "--set", "train.steps=2", "--run-dir", "out")
    assert code == 0, said
    found = steps(run)
    assert found[1]["sampler_logprob_gap"]["mean"] < 1e-5 and "sampler_logprob_gap" not in found[2]
    assert "engine against trainer: log-probs differ by" in (run / "events.jsonl").read_text()
    assert [versions(run, step) for step in (1, 2)] == [{0}, {1}]
    code, said = rft("resume", "out", "--set", "train.steps=3")
    assert code == 0, said
    assert set(steps(run)) == {1, 2, 3} and versions(run, 3) == {2}
    code, said = rft("eval", "out")
    assert code == 0 and "held_out" in said, said
    assert str(run) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_answers_go_on_under_newer_weights(rft: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    partial = ("rollout={partial: {budget_tokens: 8}, max_version_lag: 2}", "algorithm.loss.old=sampler", "train.steps=3")
    code, said = rft("train", "quickstart", *SMALL, *(item for text in partial for item in ("--set", text)), "--run-dir", "out")
    assert code == 0, said
    found = steps(tmp_path / "out")
    assert all(step["groups"] == 8 and step["version_lag"]["max"] <= 2 for step in found.values()) and found[3]["version_lag"]["max"] > 0
    gaps = [step["sampler_logprob_gap"]["mean"] for step in found.values() if "sampler_logprob_gap" in step]
    assert gaps and max(gaps) < 1e-5
    lines = [json.loads(line) for step in found for line in (tmp_path / "out" / "samples" / f"step_00000{step}.jsonl").read_text().splitlines()]
    assert any(len(line.get("segments", ())) > 1 for line in lines)
