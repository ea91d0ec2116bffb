"""Real `rft` commands on real ranks: started as a person starts them, in a directory of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rftcli.observe.metrics import EVAL, STEP, described
from rftcli.observe.numbers import flatten

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 480
SMALL = [
    *("--set", "batch.prompts_per_step=8", "--set", "rollout.samples_per_prompt=4", "--set", "train.steps=4", "--set", "checkpoint.every=1"),
    *("--set", "checkpoint.keep=10", "--set", "data.eval.held_out.limit=16"),
]
"""The quickstart, small enough for a test."""
OF_AN_EVENT = ("event", "time", "attempt", "step")
"""What every line has."""
TIMES = ("time", "seconds", "attempt", "heartbeat")


def _as_in_a_terminal() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C, tests and all they start included."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Command:
    """One `rft` process; everything it and its ranks started is ended with it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "NO_COLOR": "1", "RFT_CACHE_DIR": str(folder / "cache")}
        command = [sys.executable, "-m", "rftcli", *arguments]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_as_in_a_terminal
        )
        self.seen: set[int] = set()

    def wait(self) -> Result:
        out, err = self.process.communicate(timeout=LIMIT_SECONDS)
        return Result(self.process.returncode, out, err)

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Poll until the condition gives something; fails when the command ends before."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, self.wait()
            time.sleep(0.02)
        raise AssertionError("waited too long")


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-3000:]}"


@pytest.fixture
def rft(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()
    for path in tmp_path.glob("*/state.json"):
        if state(path.parent)["status"] == "done":
            assert not unknown_metrics(path.parent)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps without a stop, on two ranks. Read by many: who goes on with it does so with a copy."""
    folder = tmp_path_factory.mktemp("straight")
    result = Command(folder, "train", "quickstart", "--ranks", "2", "--run-dir", "run", *SMALL, "--set", "track.tensorboard=true").wait()
    assert result.code == 0, result
    return folder / "run"


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """An attempt that was killed, or whose disk was full, may have torn its last line: readers skip it, and its step is done again."""
    lines = (run / "events.jsonl").read_text().splitlines() if (run / "events.jsonl").exists() else []
    found, torn = [], 0
    for line in filter(None, lines):
        try:
            found.append(json.loads(line))
        except ValueError:
            torn += 1
    assert torn < max((record["attempt"] for record in found), default=1), "a line is torn that no later attempt follows"
    return [record for record in found if record["event"] == kind]


def unknown_metrics(run: Path) -> set[str]:
    """What its events measure without a row in the table of metrics."""
    steps_of, sets = events(run, "step"), [one for event in events(run, "eval") for one in event["sets"].values()]
    found = {name for event in steps_of for name in flatten({key: value for key, value in event.items() if key not in OF_AN_EVENT}, ".")}
    return {name for name in found if not described(name, STEP)} | {name for one in sets for name in flatten(one, ".") if not described(name, EVAL)}


def steps(run: Path) -> dict[int, dict[str, Any]]:
    """Step -> its metrics without what a clock measured; the last attempt of a step wins."""
    return {event["step"]: {key: value for key, value in event.items() if key not in TIMES} for event in events(run, "step")}


def state(run: Path) -> dict[str, Any]:
    return json.loads((run / "state.json").read_text())


def rank_pids(run: Path, attempt: int = 1) -> list[int]:
    paths = sorted((run / "attempts" / str(attempt) / "ranks").glob("rank_?.json"))
    return [int(json.loads(path.read_text())["pid"]) for path in paths]


def processes_of(run: Path) -> list[str]:
    """Command lines of every process that still belongs to a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(run) in line and process.pid != os.getpid():
            found.append(line)
    return found


def all_gone(run: Path, seconds: float = 90.0) -> bool:
    """Does every process of a run end by itself? A tracker that flushes may take a moment longer than the ranks."""
    deadline = time.monotonic() + seconds
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes_of(run)


def weights_equal(one: Path, other: Path) -> bool:
    from safetensors.torch import load_file

    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return first.keys() == second.keys() and all(bool((first[name] == second[name]).all()) for name in first)


def went_back(straight: Path, run: Path, step: int) -> None:
    """`run` becomes what `straight` was when `step` had just been done and saved, ended there: what comes later has to be done again."""
    shutil.copytree(straight, run, symlinks=True)
    for path in (run / "checkpoints").iterdir():
        if path.is_dir() and not path.is_symlink() and int(path.name.rpartition("_")[2]) > step:
            shutil.rmtree(path)
    for path in (*(run / "samples").glob("step_*"), *(run / "evals").glob("step_*")):
        if int(path.name.partition(".")[0].rpartition("_")[2]) > step:
            path.unlink()
    if (run / "final").exists():
        shutil.rmtree(run / "final")
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if (record := json.loads(line))["step"] <= step and record["event"] != "end"]
    (run / "events.jsonl").write_text("".join(kept))
    (run / "state.json").write_text(json.dumps(state(run) | {"status": "failed", "step": step}))


def arguments(settings: dict[str, str]) -> list[str]:
    """As options of a command: `--set KEY=VALUE` for each."""
    return [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]
