"""The side process that feeds TensorBoard and wandb: started by rank 0, follows the event file, cannot stop or slow the run."""

from __future__ import annotations

import json
import subprocess
import sys

from rftcli.codec import to_data
from rftcli.plan.plan import TrackPlan
from rftcli.runtime.rundir import AttemptDir

CLOSE_SECONDS = 30.0
"""How long the end of a run waits for trackers to send what they have."""


class Trackers:
    """One process for all trackers of a run; `news` says once what failed."""

    def __init__(self, attempt: AttemptDir, plan: TrackPlan) -> None:
        self._attempt = attempt
        self._told: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        if plan.tensorboard is None and plan.wandb is None:
            return
        spec = json.dumps(to_data(plan))
        command = [sys.executable, "-m", "rftcli.observe.tracker", str(attempt.run.path), "--attempt", str(attempt.number), "--spec", spec]
        with (attempt.logs / "trackers.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def news(self) -> list[tuple[str, str]]:
        """(code, text) of every tracker that has failed since the last call."""
        if self._process is None:
            return []
        found = []
        status = self._attempt.tracker_status
        states = json.loads(status.read_text(encoding="utf-8")) if status.is_file() else {}
        if self._process.poll() not in (None, 0) and not any(str(text).startswith("failed") for text in states.values()):
            states["trackers"] = f"failed: the side process ended with code {self._process.returncode}"
        for name, text in states.items():
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
