"""Evaluation in whole runs: its own rewards and sampling, more ranks than rows, nothing of training touched, an early end, comparisons."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, arguments, events, state, steps, weights_equal

SETS = (
    "{held_out: {path: 'builtin:quickstart/test.jsonl', limit: 5, samples_per_prompt: 4}, "
    "one: {path: 'builtin:quickstart/test.jsonl', limit: 1, sampling: {temperature: 0, max_new_tokens: 8}}}"
)
SETTINGS = {
    "data.eval": SETS,
    "eval": "{every: 1, temperature: 1.0, pass_k: [1, 2], vote_k: [1, 4]}",
    "eval.rewards.default": "[{rule: exact, options: {after: '####'}, weight: 2}]",
    "train.early_stop": "{metric: eval.held_out.mean@4, patience: 2, min_delta: 10}",
    "reward_shaping.running_norm": "full",
    "samples": "{every: 2, max: 6}",
    "name": "'{recipe}-{seed}'",
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, an evaluation after every step, nothing is ever better by 10: it ends after the second of four steps."""
    folder = tmp_path_factory.mktemp("watched")
    result = Command(folder, "train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, *arguments(SETTINGS)).wait()
    assert result.code == 0 and "stopped early" in result.out, result
    return folder / "run"


def test_a_run_that_does_not_get_better_ends_done(rft: Callable[..., Command], watched: Path) -> None:
    assert (state(watched)["status"], state(watched)["step"]) == ("done", 2) and "stopped early" in state(watched)["cause"]
    assert weights_equal(watched / "final", watched / "checkpoints" / "step_000002" / "policy")
    assert events(watched, "start")[0]["name"] == "quickstart-0"
    again = rft("resume", str(watched)).wait()
    assert again.code == 0 and "stopped early" in again.err and state(watched)["attempt"] == 1


def test_what_an_evaluation_says(watched: Path) -> None:
    found = events(watched, "eval")
    assert [event["step"] for event in found] == [0, 1, 2]
    held_out, one = found[-1]["sets"]["held_out"], found[-1]["sets"]["one"]
    assert (held_out["prompts"], one["prompts"]) == (5, 1)  # two ranks: uneven shares, and one rank without a row
    assert {"mean@4", "best@4", "worst@4", "std@4", "pass@1", "pass@2", "maj@1", "maj@4"} <= set(held_out) and "maj@4" not in one
    assert held_out["maj@1"]["value"] == pytest.approx(held_out["mean@4"]["value"])
    assert held_out["pass@1"]["value"] == pytest.approx(held_out["mean@4"]["value"] / 2)  # the evaluation's own full mark is 2
    assert one["response_tokens"] <= 8
    lines = [json.loads(line) for line in (watched / "evals" / "step_000002.samples.jsonl").read_text().splitlines()]
    assert len(lines) == 21 and all("answer" in line for line in lines)


def test_samples_are_written_as_often_and_as_many_as_asked(watched: Path) -> None:
    assert [path.name for path in sorted((watched / "samples").iterdir())] == ["step_000001.jsonl"]
    lines = [json.loads(line) for line in (watched / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert [(line["draw"], line["sample"]) for line in lines] == [(0, sample) for sample in range(4)]  # whole groups


def test_training_does_not_notice_evaluation(rft: Callable[..., Command], tmp_path: Path, watched: Path) -> None:
    """Nor do the running moments of rewards, which would show in the shaped ones."""
    off = ("--set", "data.eval=null", "--set", "train.steps=2", "--set", "reward_shaping.running_norm=full")
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, *off).wait()
    assert result.code == 0, result
    assert steps(tmp_path / "run") == steps(watched) and "shaped_reward_mean" in steps(watched)[2]
    assert weights_equal(tmp_path / "run" / "final", watched / "final")


def test_compared_with_where_it_came_from(rft: Callable[..., Command], tmp_path: Path, watched: Path) -> None:
    """On one rank the numbers of two; the other evaluation is that of the untrained model."""
    result = rft("eval", str(watched), "--compare", "base", "--ranks", "1", "--run-dir", "eval", "--json").wait()
    assert result.code == 0, result
    found = json.loads(result.out)
    assert found["sets"] == json.loads((tmp_path / "eval" / "compare.json").read_text())["sets"]
    for number, folder in ((2, "eval"), (0, "eval/compared")):
        (event,) = events(tmp_path / folder, "eval")
        assert event["sets"] == events(watched, "eval")[number]["sets"]
    held_out = found["sets"]["held_out"]
    before, after = (events(watched, "eval")[number]["sets"]["held_out"]["mean@4"]["value"] for number in (0, 2))
    assert held_out["difference"] == pytest.approx(after - before) and held_out["better"] + held_out["worse"] + held_out["same"] == 5
    assert 0 < held_out["sign_p"] <= 1 and held_out["permutation_exact"]


def test_commands_on_a_run_directory(rft: Callable[..., Command], tmp_path: Path, watched: Path) -> None:
    shown = rft("samples", str(watched), "--eval", "--best", "2", "--json").wait()
    assert shown.code == 0 and len(json.loads(shown.out)) == 2
    plain = rft("samples", str(watched)).wait()
    assert plain.code == 0 and "--- draw 0 sample 0" in plain.out and "completion" in plain.out
    exported = rft("export", str(watched), "out", "--step", "1", "--dtype", "bfloat16").wait()
    assert exported.code == 0 and "steps | 1 of 4" in (tmp_path / "out" / "README.md").read_text(), exported
    assert rft("export", str(watched), "out").wait().code == 2
    half = watched / "checkpoints" / ".writing_step_000009"
    half.mkdir()
    asked = rft("clean", str(watched), "--dry-run").wait()
    assert asked.code == 0 and half.name in asked.out and half.is_dir()
    done = rft("clean", str(watched), "--yes").wait()
    assert done.code == 0 and not half.exists() and (watched / "checkpoints" / "step_000001" / "COMMITTED").is_file()
