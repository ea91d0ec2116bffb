"""Sampling options in whole runs: refilled rows, a form and penalties, the same samples on one rank and on two."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, events, state

FORM = r" [0-9+= -]{0,10}#### [0-9]{1,3}"
OPTIONS = (
    *("--set", "rollout.hf={continuous: true, batch_rows: 8}", "--set", "rollout.penalties={frequency: 0.1}", "--set", "train.steps=1"),
    *("--set", f"rollout.structured={{regex: '{FORM}'}}", "--set", "eval.at_end=false", "--set", "eval.before_training=false"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2)}
    for ranks, folder in folders.items():
        result = Command(folder, "train", "quickstart", "--ranks", str(ranks), "--run-dir", "run", *SMALL, *OPTIONS).wait()
        assert result.code == 0, result
        assert "rollout.penalties, rollout.structured: completions come from another distribution" in (folder / "run" / "plan.json").read_text()
    return {ranks: folder / "run" for ranks, folder in folders.items()}


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples" / "step_000001.jsonl").read_text().splitlines()]


def test_every_answer_has_the_form_or_was_cut(runs: dict[int, Path]) -> None:
    found = samples(runs[1])
    whole = [line for line in found if line["finish"] == "stop"]
    assert len(found) == 8 * 4 and len(whole) > 16
    assert all(re.fullmatch(FORM, line["completion"].removesuffix("<|eos|>")) for line in whole)
    assert state(runs[1])["status"] == "done" and "sampler_logprob_gap" not in events(runs[1], "step")[0]


def test_one_rank_and_two_sample_the_same(runs: dict[int, Path]) -> None:
    told = ("draw", "sample", "completion", "reward", "tokens", "finish")
    one, two = ([{key: line[key] for key in told} for line in samples(runs[ranks])] for ranks in (1, 2))
    assert one == two
