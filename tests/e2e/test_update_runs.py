"""Whole runs with other ways to make an update: several rollouts for one, other optimizers and number types, memory that runs out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, events, steps, weights_equal, went_back

Start = Callable[..., Command]
OTHERS = {
    "muon": ["train.optimizer={kind: muon, weight_decay: 0.1, no_decay: ['*norm*']}", "batch.tokens_per_micro_batch=300"],
    "offloaded": ["train.offload.optimizer=cpu", "train.deterministic=true", "batch.share_prompts=true", "batch.epochs=2"],
    "bfloat16": ["models.policy.dtype=bfloat16", "train.precision={master: bfloat16, gradients: bfloat16}", "train.optimizer.lr=1e-3"],
}


def sets(*values: str) -> list[str]:
    return [text for value in values for text in ("--set", value)]


def test_several_rollouts_make_the_same_update(rft: Start, tmp_path: Path, straight: Path) -> None:
    """What is sampled does not depend on how many calls of the engine it takes; the equation says it."""
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "two", *SMALL, *sets("batch.rollouts_per_update=2")).wait()
    assert result.code == 0, result
    assert weights_equal(straight / "final", tmp_path / "two" / "final")
    assert steps(straight) == steps(tmp_path / "two")
    assert str(events(tmp_path / "two", "start")[0]["batch"]).startswith("2 rollouts x 4 prompts x 4 samples = 32 completions a step")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "bfloat16" else pytest.mark.slow) for name in OTHERS])
def test_ended_and_resumed_bit_for_bit(rft: Start, tmp_path: Path, name: str) -> None:
    how = sets(*OTHERS[name])
    straight = rft("train", "quickstart", "--ranks", "2", "--run-dir", "straight", *SMALL, *how).wait()
    assert straight.code == 0, straight
    went_back(tmp_path / "straight", tmp_path / "run", 1)
    resumed = rft("resume", "run").wait()
    assert resumed.code == 0, resumed
    assert weights_equal(tmp_path / "straight" / "final", tmp_path / "run" / "final")
    assert steps(tmp_path / "straight") == steps(tmp_path / "run")


def test_memory_that_runs_out(rft: Start, tmp_path: Path) -> None:
    """A decode pass of more rows than any machine has memory for, where every pass has equally many."""
    changes = sets("rollout.hf.batch_rows=10000000000000", "models.policy.dtype=bfloat16")
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *SMALL, *changes).wait()
    assert result.code == 1, result
    assert "out of memory in" in result.err and "rollout.hf.batch_rows (now 10000000000000)" in result.err
    assert "Traceback" not in result.err


def test_an_8_bit_optimizer_on_a_cpu_is_refused_before_anything_starts(rft: Start, tmp_path: Path) -> None:
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *sets("train.optimizer.kind=adamw_8bit")).wait()
    assert result.code == 2 and "`adamw_8bit` needs a GPU" in result.err, result
    assert not (tmp_path / "run").exists()
