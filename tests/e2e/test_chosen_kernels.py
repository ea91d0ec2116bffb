"""Ranks go without attention that plans for every new shape where answers end at different lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, events

RECIPE = """\
extends: quickstart
rewards: {default: [{python: "plans:score", name: plans}]}
"""
SCORE = "import torch\ndef score(): return float(torch.backends.cuda.cudnn_sdp_enabled())\n"


@pytest.mark.parametrize(("sets", "on"), [((), 0.0), (("--set", "rollout.ignore_eos=true"), 1.0)])
def test_attention_that_plans_for_every_shape(rft: Callable, tmp_path: Path, sets: tuple[str, ...], on: float) -> None:
    (tmp_path / "plans.py").write_text(SCORE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run = tmp_path / "run"
    result = rft("train", "recipe.yaml", "--run-dir", str(run), "--ranks", "1", *SMALL, "--set", "train.steps=1", *sets).wait()
    assert result.code == 0, result
    (step,) = events(run, "step")
    assert step["reward_mean"] == on
