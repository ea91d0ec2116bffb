"""The run directory: where everything of a run lies, and the small files that say how it stands. Paths and atomic writes only.

    recipe.yaml  recipe.resolved.yaml  plan.json  manifest.json  state.json  events.jsonl
    samples/step_000010.jsonl   evals/step_000050.json + .samples.jsonl   checkpoints/step_000050/   final/
    attempts/1/{plan.json, launch.json, logs/rank_0.log, ranks/, failures/, stop.json}   logs/latest -> the last attempt's logs

No torch: the command line reads and writes here too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcli.codec import from_data, to_data
from rftcli.errors import ResumeError, UsageError

COMMITTED = "COMMITTED"
"""The file that makes a folder a checkpoint; written last."""
HEARTBEAT_SECONDS = 5.0
DEAD_AFTER_SECONDS = 60.0
"""A run that says `running` and has not beaten for this long is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """state.json: the outcome of a run, and the only one that counts."""

    status: str
    """running, done, failed or stopped"""
    step: int
    attempt: int
    cause: str | None = None
    heartbeat: float = 0.0
    """Seconds since the epoch."""


class RunDir:
    """Names inside one run directory."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.quoted = shlex.quote(str(self.path))
        """The path as a shell takes it, for the commands that a message names."""
        self.recipe = self.path / "recipe.yaml"
        self.resolved = self.path / "recipe.resolved.yaml"
        self.plan = self.path / "plan.json"
        self.manifest = self.path / "manifest.json"
        self.state_file = self.path / "state.json"
        self.events = self.path / "events.jsonl"
        self.samples = self.path / "samples"
        self.evals = self.path / "evals"
        self.checkpoints = self.path / "checkpoints"
        self.final = self.path / "final"
        self.scores = self.path / "scores"

    def create(self, *, again: bool = False) -> None:
        """Make the directory. Raises UsageError with the ways out when something is there; `again`: more than an unfinished `create` leaves."""
        unfinished = {path.name for path in (self.recipe, self.resolved, self.plan, self.manifest, self.samples, self.evals, self.checkpoints)}
        mine = {"smoke"} | (unfinished | {".lock", "attempts", "logs"} if again and not self.state_file.exists() else set())
        going_on = f"`rft resume {self.quoted}` goes on with it; " if self.state_file.is_file() else ""
        if self.path.exists() and (not self.path.is_dir() or any(item.name not in mine for item in self.path.iterdir())):
            raise UsageError(
                f"{self.path} already holds something, and a run is never overwritten",
                hint=f"{going_on}another --run-dir starts anew; or delete it yourself",
            )
        try:
            for folder in (self.path, self.samples, self.evals, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be made: {error.strerror}", hint="give another --run-dir") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held by the command for as long as its attempt lasts: nobody else writes here. ResumeError when somebody does."""
        with (self.path / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ResumeError(f"{self.path} is being written by another command", hint=f"`rft status {self.quoted}`; stop it first") from error
            yield

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self, number)

    def last_attempt(self) -> int:
        """0 when there is none."""
        folder = self.path / "attempts"
        numbers = [int(item.name) for item in folder.iterdir() if item.name.isdigit()] if folder.is_dir() else []
        return max(numbers, default=0)

    def read_state(self) -> State | None:
        """None when the file is not there. Raises UsageError when it is not a state file."""
        try:
            return from_data(State, json.loads(self.state_file.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise UsageError(f"{self.state_file} is not a run's state file: {error}", hint=self._way_on()) from error

    def _way_on(self) -> str | None:
        """What to do about a damaged state file: it says how the run ended, and the checkpoints say the rest."""
        whole = self.committed_checkpoints()
        if not whole:
            return None
        return f"its checkpoints are whole up to {whole[-1].name}: delete state.json, and `rft resume {self.quoted}` goes on from there"

    def write_state(self, state: State) -> None:
        write_json(self.state_file, to_data(state))

    def committed_checkpoints(self) -> list[Path]:
        """Whole checkpoints, the newest last. One without COMMITTED does not exist.

        One of a later attempt is newer whatever its step: a run that went back to step 10 does not go on from the step 30 it had reached before.
        """
        folders = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        dated = [(age, folder) for folder in folders if (age := _commitment(folder)) is not None]
        return [folder for _, folder in sorted(dated)]


def commit_text(step: int, attempt: int) -> str:
    """What COMMITTED holds."""
    return f"step {step} attempt {attempt}\n"


def _commitment(folder: Path) -> tuple[int, int] | None:
    """(attempt, step) of a whole checkpoint; None for anything else. The attempt is 0 where COMMITTED does not say it."""
    name = _STEP.fullmatch(folder.name)
    if name is None:
        return None
    try:
        text = (folder / COMMITTED).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    attempt = re.search(r"attempt (\d+)", text)
    return (int(attempt[1]) if attempt else 0), int(name[1])


class AttemptDir:
    """Names inside one attempt: what the launcher and the ranks of one start tell each other."""

    def __init__(self, run: RunDir, number: int) -> None:
        self.run = run
        self.number = number
        self.path = run.path / "attempts" / str(number)
        self.plan = self.path / "plan.json"
        self.launch = self.path / "launch.json"
        self.logs = self.path / "logs"
        self.ranks = self.path / "ranks"
        self.failures = self.path / "failures"
        self.stop_file = self.path / "stop.json"
        self.rendezvous = self.path / "rendezvous"
        self.tracker_status = self.path / "trackers_status.json"

    def create(self) -> None:
        for folder in (self.path, self.logs, self.ranks, self.failures):
            folder.mkdir(parents=True, exist_ok=True)
        link = self.run.path / "logs" / "latest"
        link.parent.mkdir(exist_ok=True)
        fresh = link.with_name(f".latest-{self.number}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(self.logs, link.parent))
        fresh.replace(link)

    def log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.log"

    def request_stop(self, reason: str) -> None:
        """Ask the ranks to stop at the next step boundary. `reason`: interrupt or terminate."""
        write_json(self.stop_file, {"reason": reason, "time": time.time()})

    def ask_to_stop(self) -> None:
        """What a process of the job does on SIGTERM: the same, unless somebody has asked already. A full disk is told by the command."""
        with contextlib.suppress(OSError):
            if not self.stop_asked():
                self.request_stop("terminate")

    def stop_asked(self) -> bool:
        return self.stop_file.is_file()

    def stop_reason(self) -> str | None:
        if not self.stop_file.is_file():
            return None
        return str(json.loads(self.stop_file.read_text(encoding="utf-8"))["reason"])


def write_json(path: Path, data: Any) -> None:
    """Whole or not at all: written beside, flushed to disk, renamed."""
    write_text(path, json_text(data))


def json_text(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Half a surrogate pair, which replies of services and errors of anybody's code may hold, is written as its escape: JSON that reads as it was."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()  # half a file would take the room that is missing
        raise


_STEP = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def step_number(folder: Path) -> int:
    """The step of a folder that `step_name` named."""
    found = _STEP.fullmatch(folder.name)
    assert found is not None, folder
    return int(found[1])
