"""What cannot be gone on with is refused with exit code 4 and nothing is touched."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rftcli.errors import EXIT_RESUME, ResumeError
from rftcli.runtime.rundir import RunDir, State
from rftcli.runtime.start import resumption


def test_an_evaluation_is_not_resumed_into_a_training(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "eval")
    run.create()
    attempt = run.attempt(1)
    attempt.create()
    attempt.launch.write_text(json.dumps({"command": [], "job": {"mode": "eval", "step": 0, "checkpoint": None}}))
    run.write_state(State(status="done", step=0, attempt=1, heartbeat=time.time()))
    with pytest.raises(ResumeError, match="holds an evaluation") as caught:
        resumption(run, step=None)
    assert caught.value.exit_code == EXIT_RESUME
    assert run.last_attempt() == 1 and not run.final.exists()
