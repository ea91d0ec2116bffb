"""Whole runs: what a person starts, stops, kills and goes on with."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, all_gone, events, processes_of, rank_pids, state, steps, weights_equal


def test_the_run_directory_is_as_promised(straight: Path) -> None:
    names = ("recipe.yaml", "recipe.resolved.yaml", "plan.json", "manifest.json", "state.json", "events.jsonl", "attempts/1/plan.json")
    assert not [name for name in (*names, "attempts/1/logs/rank_1.log", "logs/latest/rank_0.log") if not (straight / name).is_file()]
    assert state(straight)["status"] == "done" and state(straight)["step"] == 4
    checkpoint = straight / "checkpoints" / "step_000004"
    assert (checkpoint / "COMMITTED").is_file() and (checkpoint / "policy" / "model.safetensors").is_file()
    assert weights_equal(checkpoint / "policy", straight / "final")
    assert [event["step"] for event in events(straight, "step")] == [1, 2, 3, 4]
    assert [event["step"] for event in events(straight, "eval")] == [0, 4]
    assert events(straight, "end")[0]["status"] == "done"
    assert list((straight / "tensorboard").rglob("events*"))
    assert processes_of(straight) == []


def test_the_step_line_accounts_for_everything(straight: Path) -> None:
    event = events(straight, "step")[1]
    wanted = {
        "reward_mean", "reward_std", "reward_parts", "labels", "advantage_mean", "advantage_std", "kl_update", "entropy", "loss", "policy_loss",
        "grad_norm", "lr", "clip_low_fraction", "clip_high_fraction", "ratio_mean", "ratio_max", "response_tokens", "prompt_tokens_mean",
        "truncated_fraction", "zero_signal_fraction", "reward_errors", "samples_dropped", "policy_version", "tokens", "tokens_total",
        "data_passes", "seconds",
    }  # fmt: skip
    assert wanted <= set(event)
    assert not {"kl", "kl_coefficient", "value_loss", "memory_gib"} & set(event)  # they do not apply: absent, not 0
    assert event["ratio_mean"] == event["ratio_max"] == 1.0 and event["kl_update"] == 0.0  # one update on its own samples
    seconds = event["seconds"]
    assert seconds["total"] == pytest.approx(sum(value for key, value in seconds.items() if key != "total"), abs=0.3 * seconds["total"])
    assert sum(e["tokens"] for e in events(straight, "step")) == events(straight, "step")[-1]["tokens_total"]


def test_samples_hold_every_completion_once(straight: Path) -> None:
    lines = [json.loads(line) for line in (straight / "samples" / "step_000003.jsonl").read_text().splitlines()]
    assert [(line["draw"], line["sample"]) for line in lines] == [(draw, sample) for draw in range(16, 24) for sample in range(4)]
    mean = sum(line["reward"] for line in lines) / len(lines)
    assert steps(straight)[3]["reward_mean"] == pytest.approx(mean)
    groups = [[line["advantage"] for line in lines if line["draw"] == draw] for draw in range(16, 24)]
    assert all(sum(group) == pytest.approx(0.0, abs=1e-5) for group in groups) and any(any(group) for group in groups)


def test_killed_in_the_middle_of_a_step(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    """SIGKILL of one rank: exit 1, the dead rank named, no process left; resumed, the run is bit for bit the one that was never killed."""
    run = tmp_path / "run"
    command = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL)
    command.wait_for(lambda: events(run, "checkpoint"))  # the first of four: steps of a tenth of a second are left to be killed in
    killed = rank_pids(run)[1]
    os.kill(killed, signal.SIGKILL)
    result = command.wait()
    assert result.code == 1, result
    assert f"rank 1 (pid {killed}) died" in result.err and "SIGKILL" in result.err and "rft resume" in result.err
    assert state(run)["status"] == "failed" and events(run, "end")[-1]["status"] == "failed"
    assert processes_of(run) == []

    resumed = rft("resume", "run").wait()
    assert resumed.code == 0, resumed
    assert state(run) | {"heartbeat": 0} == {"status": "done", "step": 4, "attempt": 2, "cause": None, "heartbeat": 0}
    assert steps(run) == steps(straight)
    assert weights_equal(run / "final", straight / "final")
    assert (run / "samples" / "step_000004.jsonl").read_text() == (straight / "samples" / "step_000004.jsonl").read_text()
    again = rft("resume", "run").wait()
    assert again.code == 0 and "nothing is left" in again.err


@pytest.mark.parametrize(
    ("number", "code", "reason", "all_of_them"),
    [(signal.SIGINT, 130, "interrupt", False), (signal.SIGTERM, 75, "terminate", False), (signal.SIGTERM, 75, "terminate", True)],
)
def test_asked_to_stop(
    rft: Callable[..., Command], tmp_path: Path, straight: Path, number: signal.Signals, code: int, reason: str, all_of_them: bool
) -> None:
    """Ctrl-C and SIGTERM, also where a service manager sends it to every process of the job: the step is finished, a checkpoint committed, the exit
    code says which; the run goes on as if nothing had been."""
    run = tmp_path / "run"
    settings = [*SMALL, "--set", "checkpoint.every=0"]
    command = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *settings)
    command.wait_for(lambda: events(run, "start"))  # before the first step: however fast the steps are, the request is there at its end
    for process in [*(psutil.Process(command.process.pid).children(recursive=True) if all_of_them else ()), command.process]:
        process.send_signal(number)
    result = command.wait()
    assert result.code == code, result
    assert state(run)["status"] == "stopped" and reason in state(run)["cause"]
    at = state(run)["step"]
    assert at == 1 and (run / "checkpoints" / f"step_{at:06d}" / "COMMITTED").is_file()
    assert processes_of(run) == []
    if number == signal.SIGTERM and not all_of_them:
        assert rft("resume", "run").wait().code == 0
        assert weights_equal(run / "final", straight / "final")


def test_the_command_itself_is_killed(rft: Callable[..., Command], tmp_path: Path) -> None:
    """SIGKILL of the command in the terminal: launcher and ranks end by themselves; nothing holds a device."""
    run = tmp_path / "run"
    command = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, "--set", "train.steps=1000", "--set", "checkpoint.every=0")
    command.wait_for(lambda: events(run, "step"))
    command.process.kill()
    assert all_gone(run)


def test_one_rank_and_two_ranks_sample_the_same(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    """The first step of one rank: the same completions, rewards and advantages, to the last bit; the same held-out answers; the same gradient."""
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *SMALL, "--set", "train.steps=1").wait()
    assert result.code == 0, result
    run = tmp_path / "run"
    assert (run / "samples" / "step_000001.jsonl").read_text() == (straight / "samples" / "step_000001.jsonl").read_text()
    assert (run / "evals" / "step_000000.samples.jsonl").read_text() == (straight / "evals" / "step_000000.samples.jsonl").read_text()
    assert steps(run)[1]["grad_norm"] == pytest.approx(steps(straight)[1]["grad_norm"], rel=1e-5)


def test_evaluation_from_the_checkpoint_folder_alone(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    import shutil

    shutil.copytree(straight / "checkpoints" / "step_000004", tmp_path / "moved")
    result = rft("eval", "moved", "--ranks", "1", "--run-dir", "eval", "--json").wait()
    assert result.code == 0, result
    found = json.loads(result.out)["evals"]["4"]["held_out"]
    assert found == events(straight, "eval")[-1]["sets"]["held_out"]


REWARD = """
import os
def fails_on_rank_1(completion, draw, step):
    if os.environ.get("RANK") == "1" and step == 2:
        raise ValueError("the verifier is gone")
    return float(len(completion) % 3)
"""


def test_a_reward_that_stops_on_one_rank_ends_all_with_its_cause(rft: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARD)
    part = "{python: 'my_rewards:fails_on_rank_1', on_error: stop}"
    quickstart = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
    (tmp_path / "mine.yaml").write_text(f"extends: [{quickstart}]\nrewards: {{default: [{part}]}}\n")
    start = time.monotonic()
    result = rft("train", "mine.yaml", "--ranks", "2", "--run-dir", "run", *SMALL, "--set", "data.eval=null").wait()
    assert result.code == 1, result
    assert "rank 1" in result.err and "the verifier is gone" in result.err and "fails_on_rank_1" in result.err
    assert time.monotonic() - start < 240
    assert processes_of(tmp_path / "run") == []


def test_the_fake_engine_runs_the_whole_path(rft: Callable[..., Command], tmp_path: Path) -> None:
    """Keyed answers without a model's sampling: several updates and epochs, a KL term, packed rows, plain rewards."""
    sets = {
        "rollout.engine": "fake", "batch.updates_per_step": "2", "batch.epochs": "2", "batch.layout": "packed", "algorithm.kl.coefficient": "0.01",
        "train.steps": "2", "rewards.default": "[{rule: length, options: {target: 4, limit: 24}}]", "algorithm.advantage.kind": "rloo",
    }  # fmt: skip
    arguments = [item for key, value in sets.items() for item in ("--set", f"{key}={value}")]
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, *arguments).wait()
    assert result.code == 0, result
    found: dict[str, Any] = steps(tmp_path / "run")[2]
    assert found["kl"] >= 0 and found["kl_coefficient"] == 0.01
    assert found["policy_version"] == 8 and found["ratio_max"] > 1.0 and found["kl_update"] > 0


def test_changed_data_is_refused_and_the_run_stays_as_it_was(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    """Resume with other rows: exit 4, state untouched; with the rows back, it goes on. A damaged checkpoint names the one before."""
    import shutil

    shutil.copytree(straight, tmp_path / "run", symlinks=True)
    run = tmp_path / "run"
    (run / "data.jsonl").write_text('{"prompt": "Q: 1+1\\nA:", "answer": "2"}\n')
    plan_path = run / "attempts" / "1" / "plan.json"
    plan = json.loads(plan_path.read_text())
    plan["steps"] = 5
    for spec in plan["data"]["train"]:
        spec["path"] = str(run / "data.jsonl")
    plan_path.write_text(json.dumps(plan))
    before = state(run)
    result = rft("resume", "run").wait()
    assert result.code == 4, result
    assert "has changed" in result.err and state(run) == before and all_gone(run)

    damaged = run / "checkpoints" / "step_000004" / "trainer" / "state"
    for path in damaged.iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    result = rft("resume", "run").wait()
    assert result.code == 4 and "--step 3" in result.err, result


def test_runs_side_by_side_with_the_launchers_port_taken(rft: Callable[..., Command], tmp_path: Path) -> None:
    """Two runs start at once while another program listens where DeepSpeed's launcher would: no run needs a port."""
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # another program has it already
        short = [*SMALL, "--set", "train.steps=1", "--set", "data.eval=null"]
        commands = [rft("train", "quickstart", "--ranks", "2", "--run-dir", name, *short) for name in ("one", "other")]
        for command in commands:
            result = command.wait()
            assert result.code == 0, result
    assert steps(tmp_path / "one") == steps(tmp_path / "other")


def test_a_rank_waits_no_longer_than_it_is_told(rft: Callable[..., Command], tmp_path: Path) -> None:
    """launch.timeout_minutes: a rank whose reward takes its time is not waited for; without the key the same run would go on."""
    late = "import os, time\ndef fn(completion):\n    time.sleep(40.0 if os.environ['RANK'] == '1' else 0.0)\n    return 1.0\n"
    (tmp_path / "late.py").write_text(late)
    settings = [*SMALL, "--set", "rewards.default=[{python: 'late:fn'}]", "--set", "data.eval=null", "--set", "launch.timeout_minutes=0.1"]
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *settings).wait()
    assert result.code == 1 and re.search(r"(?i)time.?d? ?out", state(tmp_path / "run")["cause"]), result
    assert not events(tmp_path / "run", "step") and processes_of(tmp_path / "run") == []
