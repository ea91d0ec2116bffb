"""The side process that feeds TensorBoard, wandb and a user's own observer: started by rank 0, follows the event file, cannot stop or slow it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from rftcli.codec import to_data
from rftcli.observe.files import read_json, write_json
from rftcli.plan.plan import TrackPlan
from rftcli.redact import known_values, redacted
from rftcli.runtime.rundir import AttemptDir, RunDir

FILE = "trackers.json"
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for trackers to send what they have."""


START_SECONDS = 10.0
"""How long the end of a short run waits for trackers to have started, so that one that cannot is told of."""


class Trackers:
    """One process for all trackers of a run; `news` says once what failed."""

    def __init__(self, attempt: AttemptDir, plan: TrackPlan) -> None:
        self._attempt = attempt
        self._told: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._spec = dict(to_data(plan))
        if self._spec["wandb"] is not None:  # what it is told stands in its own files, and in the list of processes
            self._spec["wandb"] = redacted(self._spec["wandb"], known_values(os.environ))

    def start(self) -> None:
        """Once what they have to find again lies in its place."""
        if not any(self._spec.values()):
            return
        attempt = self._attempt
        command = [sys.executable, "-m", "rftcli.observe.tracker", str(attempt.run.path), "--attempt", str(attempt.number)]
        command += ["--spec", json.dumps(self._spec)]
        with (attempt.logs / "trackers.log").open("ab") as log:  # a session of its own: it may still be sending when the ranks' is ended
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def last_news(self) -> list[tuple[str, str]]:
        """As `news`, at the end of a run: in a short one trackers may still be starting."""
        deadline = time.monotonic() + START_SECONDS
        wanted = sum(value is not None for value in self._spec.values())
        while self._process is not None and self._process.poll() is None and len(self._states()) < wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.news()

    def _states(self) -> dict[str, str]:
        status = self._attempt.tracker_status
        return json.loads(status.read_text(encoding="utf-8")) if status.is_file() else {}

    def news(self) -> list[tuple[str, str]]:
        """(code, text) of every tracker that has failed since the last call."""
        if self._process is None:
            return []
        found = []
        states = self._states()
        if self._process.poll() not in (None, 0) and not any(str(text).startswith("failed") for text in states.values()):
            states["trackers"] = f"failed: the side process ended with code {self._process.returncode}"
        for name, text in states.items():
            if str(text).startswith("offline") and text not in self._told:
                self._told.add(text)
                found.append(("tracker_offline", f"{name} is {text}"))
            if str(text).startswith("failed") and name not in self._told:
                self._told.add(name)
                found.append(("tracker_failed", f"{name} {text}; the run goes on (log in {self._attempt.logs / 'trackers.log'})"))
        return found

    def close(self) -> None:
        """Wait for the side process to drain the events; it ends by itself after the end event."""
        if self._process is None:
            return
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()


class TrackerIds:
    """What trackers have to find again after a resume (`trackers.json`), as part of every checkpoint. On every rank; rank 0 writes."""

    def __init__(self, run: RunDir, *, writes: bool) -> None:
        self._run, self._writes = run, writes

    def state_dict(self) -> Mapping[str, Any]:
        return {"run": self._run.path.name, "ids": read_json(self._run.path / FILE)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Where the run's own file is gone. A run of another name that starts from this checkpoint is another run to a tracker too."""
        path = self._run.path / FILE
        if self._writes and state["ids"] and state["run"] == self._run.path.name and not path.is_file():
            write_json(path, dict(state["ids"]))
