"""Stopped by the clock, by a full disk, killed anywhere; gone on with as it was, with changes, on another number of ranks, or as another run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import LIMIT_SECONDS, SMALL, Command, all_gone, events, processes_of, rank_pids, state, steps, weights_equal

STEPS = 8
LONGER = [*SMALL, "--set", f"train.steps={STEPS}", "--set", "checkpoint.keep=3", "--set", "eval.every=2"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps without a stop, on two ranks."""
    folder = tmp_path_factory.mktemp("straight")
    result = Command(folder, "train", "quickstart", "--ranks", "2", "--run-dir", "run", *LONGER).wait()
    assert result.code == 0, result
    return folder / "run"


def same(run: Path, straight: Path) -> None:
    """Bit for bit the run that nothing happened to: step lines, samples, evaluations, weights."""
    assert steps(run) == steps(straight)
    assert weights_equal(run / "final", straight / "final")
    for folder in ("samples", "evals"):
        files = {path.name: path.read_text() for path in (straight / folder).iterdir() if path.name.endswith(".jsonl")}
        assert {name: (run / folder / name).read_text() for name in files} == files
    assert not [path.name for path in run.rglob(".writing_*")]


def test_one_command_again_and_again(rft: Callable[..., Command], tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler repeats one command: stopped before its deadline, stopped by its hours, run to the end, and then there is nothing left."""
    run = tmp_path / "run"
    command = ["train", "quickstart", "--ranks", "2", "--run-dir", "run", "--resume-or-start", *LONGER, "--set", "checkpoint.every=0"]
    monkeypatch.setenv("RFT_DEADLINE", str(time.time()))
    result = rft(*command, "--set", "checkpoint.before_deadline=true").wait()
    assert result.code == 75 and "deadline" in state(run)["cause"], result
    assert (state(run)["status"], state(run)["step"]) == ("stopped", 1)
    monkeypatch.delenv("RFT_DEADLINE")
    result = rft(*command, "--set", "train.max_hours=1e-6", "--json").wait()
    assert result.code == 75 and "max_hours" in state(run)["cause"], result
    assert json.loads(result.out)["exit_code"] == 75 and state(run)["step"] == 2
    assert [event["text"] for event in events(run, "warning") if event["code"] == "changed_on_resume"]
    result = rft(*command).wait()
    assert result.code == 0, result
    same(run, straight)
    result = rft(*command).wait()
    assert result.code == 0 and "nothing is left" in result.err, result
    assert state(run)["attempt"] == 3


def test_a_second_sigterm_ends_it_at_once(rft: Callable[..., Command], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *LONGER, "--set", "train.steps=100000", "--set", "checkpoint.every=1")
    command.wait_for(lambda: events(run, "checkpoint"))
    os.kill(rank_pids(run)[0], signal.SIGSTOP)  # a step that never ends
    command.process.send_signal(signal.SIGTERM)
    command.wait_for(lambda: (run / "attempts" / "1" / "stop.json").exists())
    command.process.send_signal(signal.SIGTERM)
    result = command.wait()
    assert result.code == 75, result
    assert state(run)["status"] == "stopped" and "second SIGTERM" in state(run)["cause"] and processes_of(run) == []


HANGS = """
import threading
def never(completion, step, draw):
    if step == 3 and draw % 2:
        threading.Event().wait()
    return 0.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_reward_that_never_returns_is_left_after_its_grace(rft: Callable[..., Command], tmp_path: Path, number: int, code: int) -> None:
    """One request is enough: the part is named, the last checkpoint kept, and the run goes on without the part."""
    run = tmp_path / "run"
    (tmp_path / "hanging_part.py").write_text(HANGS)
    rewards = "rewards.default.parts=[{rule: exact, name: answer, options: {after: '####'}}, {python: 'hanging_part:never', name: slow, weight: 0}]"
    command = rft("train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, "--set", rewards, "--set", "train.steps=4")
    command.wait_for(lambda: (run / "checkpoints" / "step_000002" / "COMMITTED").exists())  # its event comes at a boundary that is never reached
    time.sleep(5)  # the third step hangs
    asked = time.monotonic()
    command.process.send_signal(number)
    result = command.wait()
    assert result.code == code and 55 < time.monotonic() - asked < 120, result
    assert state(run)["status"] == "stopped" and "reward part `slow` (hanging_part:never) has not returned on row" in state(run)["cause"]
    assert all_gone(run)
    (tmp_path / "hanging_part.py").write_text("def never(completion): return 0.0\n")
    result = rft("resume", "run").wait()
    assert result.code == 0 and state(run)["step"] == 4, result


def test_on_another_number_of_ranks_and_as_another_run(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    shutil.copytree(straight, tmp_path / "run", symlinks=True)
    run = tmp_path / "run"
    refused = rft("resume", "run", "--step", "6", "--ranks", "1").wait()
    assert refused.code == 4 and "world.ranks: 2 -> 1" in refused.err, refused
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    result = rft("resume", "run", "--step", "6", "--ranks", "1", "--accept", "--fork", "other", "--set", "train.optimizer.lr=1e-3").wait()
    assert result.code == 0, result
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    other = tmp_path / "other"
    assert sorted(steps(other)) == [7, 8] and steps(other)[7]["lr"] == pytest.approx(1e-3)
    first = "step_000007.jsonl"
    assert (other / "samples" / first).read_text() == (run / "samples" / first).read_text()  # the weights came along whole: the same samples
    assert json.loads((other / "manifest.json").read_text())["forked_from"]["step"] == 6
    assert rft("status", "run", "--json").wait().out.count('"done"') == 1


def small_disk(path: Path, mebibytes: int) -> bool:
    """A file system of its own at `path`, where this machine allows it."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """(where runs go, is it small?)"""
    path = tmp_path / "disk"
    mounted = small_disk(path, 64)
    yield path, mounted
    if mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_fills_while_saving(rft: Callable[..., Command], tmp_path: Path, straight: Path, disk: tuple[Path, bool]) -> None:
    """Exit 1 with what is missing, the checkpoint before whole, nothing half; with room again the run goes on."""
    folder, mounted = disk
    size = sum(path.stat().st_size for path in (straight / "checkpoints" / "step_000008").rglob("*") if path.is_file())
    ballast = folder / "ballast"
    run = folder / "run"
    command = rft("train", "quickstart", "--ranks", "2", "--run-dir", str(run), *LONGER)
    command.wait_for(lambda: events(run, "checkpoint"))
    at = len(events(run, "checkpoint"))
    if mounted:
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(65536))
            except OSError:
                pass
    else:
        import resource

        for pid in rank_pids(run):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size // 8, size // 8))
    result = command.wait()
    assert result.code == 1, result
    assert "no space left on the disk" in result.err and "are free" in result.err and "Traceback" not in result.err, result
    assert processes_of(run) == []
    whole = sorted(path.parent.name for path in (run / "checkpoints").rglob("COMMITTED"))
    assert len(whole) >= min(at, 3)
    ballast.unlink(missing_ok=True)
    result = rft("resume", str(run)).wait()
    assert result.code == 0, result
    same(run, straight)


def stage(run: Path, attempt: int) -> str:
    """The last thing that rank 0 said it does."""
    log = run / "attempts" / str(attempt) / "logs" / "rank_0.log"
    lines = [line for line in log.read_text(errors="replace").splitlines() if " rft: " in line] if log.exists() else []
    return lines[-1].split(" rft: ")[1] if lines else ""


KILLS: dict[str, Callable[[Path, int], object]] = {
    "rollout": lambda run, attempt: stage(run, attempt).endswith("collect"),
    "learn": lambda run, attempt: stage(run, attempt) == "learn",
    "eval": lambda run, attempt: stage(run, attempt) == "eval",
    "writing a checkpoint": lambda run, attempt: list((run / "checkpoints").glob(".writing_*")),
    "sync": lambda run, attempt: stage(run, attempt) == "sync",
    "merging samples": lambda run, attempt: list((run / "samples").glob(".step_*")),
}
"""Where a rank is killed: true as soon as a run is there. The shortest come last: a busy machine may miss them until the run is done."""


def killed(
    rft: Callable[..., Command], run: Path, attempt: int, rank: int, when: Callable[[], object], settings: list[str] = LONGER
) -> bool:
    """Start or go on, kill one rank when `when` says so. False: the run was done before."""
    if attempt == 1:
        command = rft("train", "quickstart", "--ranks", "2", "--run-dir", str(run), *settings)
    else:
        command = rft("resume", str(run))
    while command.process.poll() is None and len(rank_pids(run, attempt)) < 2:
        time.sleep(0.02)
    deadline = time.monotonic() + LIMIT_SECONDS
    while command.process.poll() is None and not when():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
    if command.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it had just ended
            os.kill(rank_pids(run, attempt)[rank], signal.SIGKILL)
    result = command.wait()
    assert result.code in (0, 1), result
    return result.code == 1


def test_killed_in_every_stage(rft: Callable[..., Command], tmp_path: Path, straight: Path) -> None:
    """A kill of one rank in each stage, one after another in one run, which ends bit for bit as the one that was never killed."""
    run = tmp_path / "run"
    attempt, dead = 1, 0
    for number, condition in enumerate(KILLS.values()):
        if not killed(rft, run, attempt, number % 2, lambda attempt=attempt, condition=condition: condition(run, attempt)):  # type: ignore[misc]
            break
        dead += 1
        attempt += 1
        assert state(run)["status"] == "failed" and processes_of(run) == []
    assert dead >= 4
    assert rft("resume", str(run)).wait().code == 0
    same(run, straight)


HOLDING = """\
import asyncio, pathlib, time
HERE = pathlib.Path({folder!r})
async def score(completion, step):
    if step == 2 and (HERE / "hold_scores").exists():
        with (HERE / "held_scores").open("a") as file:
            file.write(".")
        while (HERE / "hold_scores").exists():
            await asyncio.sleep(0.05)
    return float(len(completion) % 3)
def estimate(rewards):
    while (HERE / "hold_credit").exists():
        (HERE / "held_credit").touch()
        time.sleep(0.05)
    return rewards - rewards.mean()
"""
"""Rewards and an estimator that wait while the test says so, and say that they do."""


def test_killed_while_rewards_score_and_while_credit_is_given(rft: Callable[..., Command], tmp_path: Path) -> None:
    """When both ranks have as many completions of step 2 with the rewards as those take at once; then while rank 0 estimates advantages for both."""
    (tmp_path / "holding.py").write_text(HOLDING.format(folder=str(tmp_path)))
    settings = [*SMALL, "--set", "rewards.default=[{python: 'holding:score'}]", "--set", "algorithm.kl.coefficient=0.05"]
    settings += ["--set", "algorithm.advantage={kind: python, python: 'holding:estimate'}"]
    settings += ["--set", "eval={before_training: false, at_end: false}"]  # an evaluation calls the reward too
    run, straight = tmp_path / "run", tmp_path / "straight"
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", str(straight), *settings).wait()
    assert result.code == 0, result
    scores, credit, held = tmp_path / "hold_scores", tmp_path / "hold_credit", tmp_path / "held_scores"
    saved = run / "checkpoints" / "step_000001" / "COMMITTED"
    scores.touch()
    assert killed(rft, run, 1, 0, lambda: held.exists() and held.stat().st_size == 2 * 8 and saved.exists(), settings)
    assert stage(run, 1) == "step 2: collect" and state(run)["step"] == 1, "scoring is part of collecting"
    scores.unlink()
    credit.touch()
    assert killed(rft, run, 2, 1, (tmp_path / "held_credit").exists, settings)
    assert stage(run, 2) == "credit" and state(run)["step"] == 1
    credit.unlink()
    assert rft("resume", str(run)).wait().code == 0
    same(run, straight)


@pytest.mark.slow
def test_killed_twenty_times_at_random(rft: Callable[..., Command], tmp_path: Path) -> None:
    """Twenty kills at keyed times within two steps of a start: wherever they strike, the run ends as one that nothing happened to."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    settings = [*LONGER, "--set", "train.steps=80", "--set", "eval.every=10"]
    result = rft("train", "quickstart", "--ranks", "2", "--run-dir", str(straight), *settings).wait()
    assert result.code == 0, result
    step_seconds = [event["seconds"]["total"] for event in events(straight, "step")]
    window = 2 * sum(step_seconds) / len(step_seconds)
    chance = random.Random(0)
    for attempt in range(1, 21):
        after, begun = chance.uniform(0.0, window), []

        def due(attempt: int = attempt, after: float = after, begun: list[float] = begun) -> bool:
            if not begun and [event for event in events(run, "start") if event["attempt"] == attempt]:
                begun.append(time.monotonic())
            return bool(begun) and time.monotonic() - begun[0] > after

        assert killed(rft, run, attempt, chance.randrange(2), due, settings), f"only {attempt - 1} kills: the run was done"
    result = rft("resume", str(run)).wait()
    assert result.code == 0, result
    same(run, straight)


def test_a_run_that_was_killed_does_not_look_alive(rft: Callable[..., Command], tmp_path: Path) -> None:
    """At once, by its process; and again where it runs, by the same."""
    run = tmp_path / "run"
    command = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *LONGER, "--set", "train.steps=100000", "--set", "checkpoint.every=0")
    command.wait_for(lambda: events(run, "step"))
    assert json.loads(rft("status", "run", "--json").wait().out)["dead"] is False
    command.process.kill()
    for pid in rank_pids(run):
        os.kill(pid, signal.SIGKILL)
    found = json.loads(rft("status", "run", "--json").wait().out)
    assert (found["status"], found["dead"]) == ("running", True)
    assert "is gone" in rft("status", "run").wait().out
    assert all_gone(run)


def test_trying_a_recipe_before_it_runs(rft: Callable[..., Command], tmp_path: Path) -> None:
    """--smoke: two attempts under smoke/, the verdict, and the real run can start in the same directory."""
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", "--smoke", "--set", "track.tensorboard=true").wait()
    assert result.code == 0 and "smoke: ok" in result.err and "forward and backward" in result.err, result
    smoke = tmp_path / "run" / "smoke"
    assert state(smoke)["status"] == "done" and state(smoke)["attempt"] == 2 and sorted(steps(smoke)) == [1, 2]
    assert not (smoke / "tensorboard").exists() and not (tmp_path / "run" / "state.json").exists()
    assert all(event["response_tokens"]["max"] <= 16 for event in events(smoke, "step"))
    critic = ["--set", "models.critic={}", "--set", "algorithm.advantage.kind=gae"]
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "other", "--smoke", *critic).wait()
    assert result.code == 0 and "through the policy and the critic" in result.out + result.err, result
    settings = [*SMALL, "--set", "train.steps=1", "--set", "checkpoint.trainer_state=false"]
    result = rft("train", "quickstart", "--ranks", "1", "--run-dir", "run", *settings).wait()
    assert result.code == 0, result
    refused = rft("resume", "run", "--set", "train.steps=2").wait()
    assert refused.code == 4 and "no trainer state" in refused.err
    result = rft("resume", "run", "--set", "train.steps=2", "--accept").wait()
    assert result.code == 0 and sorted(steps(tmp_path / "run")) == [1, 2], result


def test_a_reader_that_has_gone_is_no_failure(tmp_path: Path) -> None:
    """`rft explain ... | head -1`: nothing on stderr."""
    root = Path(__file__).resolve().parents[2]
    for arguments in ("plan quickstart --ranks 1 --json", "schema", "--help"):
        line = f"{sys.executable} -m rftcli {arguments} | true; exit ${{PIPESTATUS[0]}}"
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr, done
