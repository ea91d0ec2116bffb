"""Whole runs with other losses and devices: ended and resumed bit for bit, what the step line says, what is refused before anything starts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, steps, weights_equal, went_back

Start = Callable[..., Command]
SHORT = [*SMALL, "--set", "eval={before_training: false, at_end: false}", "--set", "data.eval=null"]
DEVICES = [
    "algorithm.loss={kind: clip_cov, options: {share: 0.05, low: -5, high: 5}, correction: {cap: 1.5, reject: {by: k3, bound: 0.1}}, "
    "entropy_coefficient: 0.01, entropy_controller: {target: 0.5, delta: 0.002}, top_entropy_share: 0.5, off_policy_mask: 0.001}",
    "algorithm.kl={coefficient: 0.01, ratio_weighted: true}",
    "batch.epochs=2",
]
KINDS = {
    "rloo_sequence": "{kind: rloo_sequence}", "gspo": "{kind: gspo}", "gmpo": "{kind: gmpo}", "cispo": "{kind: cispo, clip_high: 4}",
    "sapo": "{kind: sapo}", "cpg": "{kind: cpg, options: {drift: 0.1}}", "kl_cov": "{kind: kl_cov}", "reinforce": "{kind: reinforce}",
    "dro": "{kind: dro}",
}  # fmt: skip
OWN = """
def mine(new, old, advantages, *, scale):
    return -scale * advantages * new
"""


def sets(*values: str) -> list[str]:
    return [text for value in values for text in ("--set", value)]


def test_all_devices_together_are_resumed_bit_for_bit(rft: Start, tmp_path: Path) -> None:
    how = [*SHORT, *sets(*DEVICES, "train.steps=3")]
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "straight", *how).wait()
    assert result.code == 0, result
    went_back(tmp_path / "straight", tmp_path / "run", 1)
    resumed = rft("resume", "run").wait()
    assert resumed.code == 0, resumed
    assert weights_equal(tmp_path / "straight" / "final", tmp_path / "run" / "final")
    found = steps(tmp_path / "straight")
    assert found == steps(tmp_path / "run")
    for line in found.values():
        correction = line["correction"]
        assert correction["missing"] == 0 and correction["rejected_fraction"] == correction["masked_fraction"] == 0
        assert correction["mean"] == pytest.approx(1.0, abs=1e-4) and correction["effective"] == pytest.approx(1.0, abs=1e-4)
        assert line["sampler_logprob_gap"]["mean"] < 1e-4
    coefficients = [line["entropy_coefficient"] for line in found.values()]
    assert len(set(coefficients)) > 1  # two updates a step, and it moves after each


def test_a_loss_of_ones_own_on_the_samplers_log_probs(rft: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "recipe.yaml").write_text(
        "extends: quickstart\nalgorithm: {loss: {kind: python, python: 'mine:mine', options: {scale: 0.5}, old: sampler}}\n"
    )
    result = rft("train", "recipe.yaml", "--ranks", "1", "--run-dir", "run", *SHORT, *sets("train.steps=2")).wait()
    assert result.code == 0, result
    for line in steps(tmp_path / "run").values():
        assert "clip_low_fraction" not in line and line["correction"] == {"missing": 0}
        assert line["sampler_logprob_gap"]["mean"] < 1e-4 and line["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    (tmp_path / "mine.py").write_text("def mine(new, old): ...")
    result = rft("validate-recipe", "recipe.yaml").wait()
    assert result.code == 2 and "`mine:mine` cannot be called with (new, old, advantages) and scale" in result.err, result


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_runs(rft: Start, tmp_path: Path, name: str) -> None:
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *SHORT, *sets(f"algorithm.loss={KINDS[name]}", "train.steps=2")).wait()
    assert result.code == 0, result
    assert all(math.isfinite(line["policy_loss"]) and line["grad_norm"] > 0 for line in steps(tmp_path / "run").values())
