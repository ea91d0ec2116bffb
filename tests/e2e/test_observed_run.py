"""One run with everything that watches it: a user's observer that breaks, a trace, TensorBoard, a secret on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SMALL, Command, events, state

OWN = """
class Mine:
    def see(self, event):
        if event.kind == "step":
            raise ValueError("mine is broken")
"""


def test_nothing_that_watches_stops_a_run(rft: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "f00dfeedf00dfeed")
    (tmp_path / "my_observer.py").write_text(OWN)
    (tmp_path / "mine.yaml").write_text(f"extends: [{Path(__file__).resolve().parents[2] / 'recipes' / 'quickstart.yaml'}]\n")
    sets = ("train.steps=2", "track={tensorboard: true, python: 'my_observer:Mine'}", "profile={steps: [2], ranks: all}", "name=f00dfeedf00dfeed")
    arguments = [item for one in sets for item in ("--set", one)]
    result = rft("train", "mine.yaml", "--ranks", "2", "--run-dir", "run", *SMALL, *arguments).wait()
    run = tmp_path / "run"
    assert result.code == 0 and state(run)["status"] == "done", result
    (warning,) = [event for event in events(run, "warning") if event["code"] == "tracker_failed"]
    assert "python failed: ValueError: mine is broken" in warning["text"]
    traces = sorted((run / "attempts" / "1" / "profile").iterdir())
    assert [path.name for path in traces] == ["rank_0_step_000002.json", "rank_1_step_000002.json"]
    assert all(json.loads(path.read_text())["traceEvents"] for path in traces)
    assert "f00dfeed" not in (run / "manifest.json").read_text().replace("name=***", "")

    result = rft("train", "mine.yaml", "--ranks", "2", "--run-dir", "other", "--set", "track.python=my_observer:Yours").wait()
    assert result.code == 2 and "has no class `Yours`" in result.err and "classes there: Mine" in result.err, result
    assert not (tmp_path / "other").exists()
