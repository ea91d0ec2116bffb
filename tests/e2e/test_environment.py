"""What the environment says stays out of everything a run writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, state

RECIPE = """\
extends: quickstart
name: quiet
models:
  policy: {path: '${SECRET_MODEL}'}
data:
  train: {path: '${SECRET_FOLDER}/train.jsonl'}
  eval: {held_out: {path: '${SECRET_FOLDER}/test.jsonl'}}
rewards:
  default:
    - python: quiet_reward:fn
      options:
        key: ${SECRET_KEY}
        number: ${SECRET_NUMBER}
"""
REWARD = """\
def fn(completion, key, number):
    assert (key, number) == ("sesame-open-5533", 7766554433), "the reward gets the real values"
    return float(len(completion) % 2)
"""


def test_no_value_of_the_environment_is_written(rft: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, evaluate and show with references everywhere: their values are in no file of the run and in no output."""
    from rftcli.builtin import builtin_path

    data = tmp_path / "whereabouts-9911"
    data.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (data / name).write_bytes(builtin_path(f"quickstart/{name}").read_bytes())
    model = tmp_path / "model-8822"
    model.symlink_to(builtin_path("quickstart"))
    values = {"FOLDER": str(data), "MODEL": str(model), "KEY": "sesame-open-5533", "NUMBER": "7766554433"}
    for name, value in values.items():
        monkeypatch.setenv(f"SECRET_{name}", value)
    (tmp_path / "quiet.yaml").write_text(RECIPE)
    (tmp_path / "quiet_reward.py").write_text(REWARD)
    small = [*SMALL, "--set", "train.steps=2"]
    run, scores = tmp_path / "run", tmp_path / "scores"
    trained = rft("train", "quiet.yaml", "--ranks", "1", "--run-dir", str(run), *small).wait()
    assert trained.code == 0, trained
    assert state(run)["status"] == "done"
    scored = rft("eval", "quiet.yaml", "--ranks", "1", "--run-dir", str(scores), *small).wait()
    assert scored.code == 0, scored
    shown = [rft("show", "quiet.yaml", "--json").wait(), rft("show", "quiet.yaml").wait(), rft("plan", "quiet.yaml", "--ranks", "1", "--json").wait()]
    assert all(result.code == 0 for result in shown), shown
    parts = ("whereabouts-9911", "model-8822", values["KEY"], values["NUMBER"])
    for result in (trained, scored, *shown):
        assert not any(part in result.out for part in parts), result.out
    files = [path for folder in (run, scores) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    own = [path for path in files if path.name != "quiet_reward.py"]  # the copy of the test's own reward
    assert not [(str(path), part) for path in own for part in parts if part.encode() in path.read_bytes()]
