"""Whole runs with adapters: killed and gone on with, evaluated, loaded by others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, arguments, events, steps, weights_equal, went_back

TOKENS = "[" + ", ".join(f"<step{number}>" for number in range(12)) + "]"
"""More than the quickstart model has spare rows for."""
ADAPTED = {
    "models.policy.lora": "{rank: 4, alpha: 8}",
    "models.policy.ema": "{decay: 0.5, evaluate: true, export: true}",
    "models.policy.add_tokens": TOKENS,
    "models.reference.refresh": "{every: 2, mix: 0.5}",
    "algorithm.kl.coefficient": "0.05",
    "train.optimizer.lr": "1e-2",
    "train.deepspeed.zero_stage": "3",
    "eval.every": "2",
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    result = Command(folder, "train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, *arguments(ADAPTED)).wait()
    assert result.code == 0, result
    return folder / "run"


def test_an_adapted_run_goes_on_bit_for_bit(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    """SIGKILL of a rank after a checkpoint that holds a mean and a refreshed reference: resumed, the run is the one that was never killed."""
    run = tmp_path / "run"
    went_back(straight, run, 2)
    result = rft("resume", "run").wait()
    assert result.code == 0, result
    assert weights_equal(run / "final", straight / "final")
    assert not weights_equal(straight / "final", straight / "checkpoints" / "step_000004" / "policy")  # the mean is not the last weights
    for folder in ("policy", "ema"):
        assert weights_equal(run / "checkpoints" / "step_000004" / folder, straight / "checkpoints" / "step_000004" / folder)
    assert steps(run)[4] == steps(straight)[4]
    first, then = steps(straight)[1]["kl"], steps(straight)[2]["kl"]
    assert first == pytest.approx(0.0, abs=1e-8) and then > 1e-6


def test_the_running_mean_is_evaluated_beside_the_live_weights(straight: Path) -> None:
    found = events(straight, "eval")
    assert [event["step"] for event in found] == [0, 2, 4]
    assert set(found[-1]["sets"]) == {"held_out", "held_out@ema"} and found[0]["sets"]["held_out"] == found[0]["sets"]["held_out@ema"]
    lines = [json.loads(line) for line in (straight / "evals" / "step_000004.samples.jsonl").read_text().splitlines()]
    assert {line["set"] for line in lines} == {"held_out", "held_out@ema"}


def test_checkpoints_load_with_transformers_and_peft(straight: Path) -> None:
    """Merged, apart on the grown base, and evaluated: one policy."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rftcli.builtin import builtin_path
    from rftcli.models.vocabulary import grow_embeddings

    checkpoint = straight / "checkpoints" / "step_000004"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "policy")
    merged = AutoModelForCausalLM.from_pretrained(checkpoint / "policy", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(str(builtin_path("quickstart")), dtype=torch.float32).eval()
    assert merged.config.vocab_size == len(tokenizer) > base.config.vocab_size
    grow_embeddings(base, tokenizer)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        before = base(ids).logits
        apart = PeftModel.from_pretrained(base, checkpoint / "adapter").eval()(ids).logits
        assert torch.allclose(apart, merged(ids).logits, atol=1e-3) and not torch.allclose(apart, before, atol=1e-2)
    assert json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_evaluation_of_an_adapted_checkpoint(rft: Callable[..., Command], straight: Path) -> None:
    result = rft("eval", str(straight), "--ranks", "1", "--run-dir", "eval", "--json").wait()
    assert result.code == 0, result
    found: dict[str, Any] = json.loads(result.out)["evals"]["4"]["held_out"]
    assert found["prompts"] == 16 and found["mean@1"] == events(straight, "eval")[-1]["sets"]["held_out"]["mean@1"]


@pytest.mark.slow
def test_going_on_from_an_adapter_in_bfloat16(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    """Another run starts from the saved adapter; the reference is a frozen copy of it: no KL in the first step."""
    adapter = straight / "checkpoints" / "step_000004" / "adapter"
    sets = {
        "models.policy.lora": f"{{start_from: {adapter}, dropout: 0.1}}", "models.policy.dtype": "bfloat16", "algorithm.kl.coefficient": "0.05",
        "train.steps": "2", "models.policy.add_tokens": TOKENS, "train.optimizer.lr": "1e-2", "data.eval": "null",
    }  # fmt: skip
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, *arguments(sets)).wait()
    assert result.code == 0, result
    first, second = (steps(tmp_path / "run")[step] for step in (1, 2))
    assert first["kl"] == pytest.approx(0.0, abs=1e-6) and second["kl"] > 0 and first["ratio_max"] != 1.0  # its dropout is no policy of its own


def test_a_pattern_that_freezes_nothing_never_starts(rft: Callable[..., Command], tmp_path: Path) -> None:
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", "--set", "models.policy.freeze=[vision.*]").wait()
    assert result.code == 2 and "`vision.*` matches no parameter" in result.err and not (tmp_path / "run").exists()
