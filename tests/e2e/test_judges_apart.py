"""Whole runs with a judge that they start: it scores, ends with the run, with the command, and with a rank; its own end ends the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import ROOT, SMALL, Command, arguments, events, rank_pids, steps

from rftcli.builtin import builtin_path

COMMAND = [sys.executable, str(ROOT / "tests" / "fake_judge_command.py")]


@pytest.fixture(autouse=True)
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "told"
    folder.mkdir()
    monkeypatch.setenv("FAKE_JUDGE_TOLD", str(folder))
    return folder


def judged(tmp_path: Path, name: str) -> list[str]:
    """The quickstart, scored by its rule and by a judge; a checkpoint called `name`."""
    model = tmp_path / name
    shutil.copytree(builtin_path("quickstart"), model)
    scorer = f"{{kind: generative, path: {model}, prompt: '{{{{ completion }}}}', score: {{regex: 'score: (.+)', scale: 0.01}}, "
    scorer += f"placement: {{gpus: 0, command: {json.dumps(COMMAND)}}}}}"
    sets = {"models.scorers.judge": scorer, "rewards.default": "[{rule: exact, options: {after: '####'}}, {model: judge, on_error: abstain}]",
            "eval.before_training": "false", "eval.at_end": "false"}  # fmt: skip
    return ["--ranks", "2", "--run-dir", "run", *SMALL, *arguments(sets)]


def pids(told: Path) -> list[int]:
    return [pid for path in told.glob("*.json") for pid in json.loads(path.read_text())["pids"]]


def none_left(told: Path, seconds: float = 20.0) -> bool:
    found = [psutil.Process(pid) for pid in pids(told) if psutil.pid_exists(pid)]
    return not psutil.wait_procs([process for process in found if process.status() != psutil.STATUS_ZOMBIE], timeout=seconds)[1]


@pytest.mark.parametrize("victim", ["command", pytest.param("rank", marks=pytest.mark.slow)])
def test_a_judge_scores_all_ranks_and_a_kill_leaves_none(rft: Callable[..., Command], tmp_path: Path, told: Path, victim: str) -> None:
    run = tmp_path / "run"
    command = rft("train", "quickstart", *judged(tmp_path, "model"), "--set", "train.steps=1000")
    command.wait_for(lambda: 1 in steps(run))
    assert len(list(told.glob("*.json"))) == 1 and all(psutil.pid_exists(pid) for pid in pids(told))
    os.kill(command.process.pid if victim == "command" else rank_pids(run)[0], signal.SIGKILL)
    command.wait()
    assert none_left(told)
    lines = [json.loads(line) for line in (run / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert len(lines) == 32 and (run / "logs" / "latest" / "judge_judge.log").is_file()
    for line in lines:
        text = line["completion"].removesuffix(line.get("special_end", ""))
        assert line["parts"]["judge"]["value"] == pytest.approx(len(text) / 100), line


@pytest.mark.slow
def test_a_judge_ends_with_the_run(rft: Callable[..., Command], tmp_path: Path, told: Path) -> None:
    result = rft("train", "quickstart", *judged(tmp_path, "model"), "--set", "train.steps=1").wait()
    assert result.code == 0, result
    assert none_left(told, 0)


def test_a_judge_that_ends_ends_the_run(rft: Callable[..., Command], tmp_path: Path, told: Path) -> None:
    """Although its part abstains from what it cannot score."""
    result = rft("train", "quickstart", *judged(tmp_path, "mortal")).wait()
    assert result.code == 1 and "the server of judge `judge`" in result.err and "is gone: it ended with code 9" in result.err, result
    assert "CUDA Error: device-side assert triggered" in result.err and "rft resume" in result.err
    assert not events(tmp_path / "run", "step") and none_left(told)
