"""A run is created once, goes on where it stood, and is refused with the reason where it cannot; nothing is started here."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - with it here, prompts are measured in this process, not in one of their own

from rftcli import __version__
from rftcli.errors import EXIT_RESUME, EXIT_USAGE, ResumeError, UsageError
from rftcli.plan.plan import Plan, plan_from_json, plan_hash, plan_to_json
from rftcli.recipe.load import load_recipe
from rftcli.runtime.prepare import Prepared, prepare
from rftcli.runtime.rundir import COMMITTED, RunDir, State, commit_text, step_name
from rftcli.runtime.start import create, evaluation, holds_run, resumption
from rftcli.runtime.verdict import process_start

RECIPE = """\
models: {policy: {path: 'builtin:quickstart'}}
data:
  train: {path: rows.jsonl}
  eval: {train: {path: rows.jsonl, limit: 2}}
rollout: {max_prompt_tokens: 24, max_new_tokens: 24}
rewards: {default: [{rule: exact}]}
batch: {prompts_per_step: 4}
train: {steps: 30}
"""


pytestmark = pytest.mark.usefixtures("eight_rows")


def prepared(*sets: str, text: str = RECIPE, ranks: int = 2) -> Prepared:
    Path("mine.yaml").write_text(text)
    return prepare(Path("mine.yaml"), sets, ranks=ranks, gpus=None)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create(prepared(), tmp_path / "run")


def stands(run: RunDir, status: str, step: int = 0, attempt: int = 1, plan: Plan | None = None) -> Plan:
    """Make it a run with attempts and a state."""
    plan = plan or plan_from_json(run.plan.read_text())
    for number in range(1, attempt + 1):
        run.attempt(number).create()
        run.attempt(number).plan.write_text(plan_to_json(plan))
    run.write_state(State(status=status, step=step, attempt=attempt, heartbeat=time.time()))
    return plan


def checkpoint(run: RunDir, step: int, *, attempt: int = 1, ranks: int = 2, whole: bool = True, policy: bool = True) -> Path:
    folder = run.checkpoints / step_name(step)
    (folder / "policy").mkdir(parents=True) if policy else folder.mkdir()
    (folder / "trainer").mkdir()
    (folder / "progress.json").write_text(json.dumps({"step": step, "plan": "", "ranks": ranks, "state": {}}))
    (folder / "plan.json").write_text(run.plan.read_text())
    if whole:
        (folder / COMMITTED).write_text(commit_text(step, attempt))
    return folder


def refused(run: RunDir, step: int | None = None) -> ResumeError:
    with pytest.raises(ResumeError) as caught:
        resumption(run, step=step)
    assert caught.value.exit_code == EXIT_RESUME == 4
    return caught.value


def test_what_is_in_a_new_run(run: RunDir, tmp_path: Path) -> None:
    assert {path.name for path in run.path.iterdir()} == {
        "recipe.yaml", "recipe.resolved.yaml", "plan.json", "manifest.json", "samples", "evals", "checkpoints",
    }  # fmt: skip
    assert run.recipe.read_text() == RECIPE
    assert plan_from_json(run.plan.read_text()) == prepared().plan
    assert load_recipe(run.resolved).recipe.train.steps == 30


def test_the_resolved_recipe_is_the_run_again(run: RunDir, tmp_path: Path) -> None:
    """From its own folder, with everything that was on the command line: the same plan but for the name and the folder of user code."""
    first = create(prepared("seed=5", "train.max_grad_norm=null"), tmp_path / "other")
    plan = plan_from_json(first.plan.read_text())
    again = prepare(first.resolved, ["name=mine"], ranks=2, gpus=None).plan
    assert replace(again, rewards=replace(again.rewards, search_path=str(tmp_path))) == plan and plan.seed == 5


def test_the_manifest_says_what_ran(run: RunDir) -> None:
    data = json.loads(run.manifest.read_text())
    assert data["version"] == __version__ and data["seed"] == 0 and data["argv"] == sys.argv
    assert data["plan"] == plan_hash(plan_from_json(run.plan.read_text()))
    assert {"torch", "transformers", "deepspeed"} <= set(data["packages"]) and all(data["packages"].values())
    assert data["machine"]["cores"] >= 1 and data["python"].startswith("3.")
    assert {name: one["rows"] for name, one in data["data"]["train"].items()} == {"train": 8}
    assert {name: one["rows"] for name, one in data["data"]["eval"].items()} == {"train": 2}  # of the same name as the training set
    assert all(len(one["fingerprint"]) == 64 for part in data["data"].values() for one in part.values())


def test_a_finished_plan_has_no_recipe(tmp_path: Path) -> None:
    Path("plan.json").write_text(plan_to_json(prepared().plan))
    run = create(prepare(Path("plan.json"), [], ranks=None, gpus=None), tmp_path / "run")
    assert not run.recipe.exists() and not run.resolved.exists() and run.plan.read_text() == Path("plan.json").read_text()
    assert json.loads(run.manifest.read_text())["data"] == {}


def test_a_run_has_a_directory_of_its_own_by_default(tmp_path: Path) -> None:
    run = create(prepared("name=mine"), None)
    assert run.path.parent == tmp_path / "runs" and run.path.name.startswith("mine-20") and run.path.name.endswith("Z")


def test_a_used_directory_is_refused(run: RunDir) -> None:
    before = run.plan.read_text()
    with pytest.raises(UsageError, match="already holds something") as caught:
        create(prepared("seed=1"), run.path)
    assert caught.value.exit_code == EXIT_USAGE and run.plan.read_text() == before


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be made: Not a directory"):
        create(prepared(), tmp_path / "rows.jsonl" / "run")


SECRET = "f00dfeed"
WITH_SECRETS = """\
name: run-${PART}
models: {policy: {path: 'builtin:quickstart', chat: {prefill: 'I am ${PART}'}}}
data:
  train: {path: '${HOME_OF_DATA}/rows.jsonl'}
  eval: {t: {path: '${HOME_OF_DATA}/rows.jsonl'}}
rollout: {max_prompt_tokens: 64, max_new_tokens: 24}
rewards: {default: [{rule: exact, options: {after: '${PART}'}}]}
batch: {prompts_per_step: 4}
train: {steps: '${STEPS}'}
track: {wandb: {entity: '${PART}', tags: ['${PART}', plain]}}
"""


def test_values_of_the_environment_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file that is written from the recipe holds them, but for numbers, and for the name of the run, which is its directory's too."""
    (tmp_path / SECRET).mkdir()
    (tmp_path / SECRET / "rows.jsonl").write_text(Path("rows.jsonl").read_text())
    monkeypatch.setenv("PART", f"{SECRET}-part")
    monkeypatch.setenv("HOME_OF_DATA", str(tmp_path / SECRET))
    monkeypatch.setenv("STEPS", "17")
    run = create(prepared(text=WITH_SECRETS), tmp_path / "run")
    assert SECRET not in run.recipe.read_text() and SECRET not in run.resolved.read_text() and SECRET not in run.manifest.read_text()
    assert "${STEPS}" in run.resolved.read_text() and "${HOME_OF_DATA}/rows.jsonl" in run.resolved.read_text()
    assert load_recipe(run.resolved).recipe == load_recipe("mine.yaml").recipe
    plan = json.loads(run.plan.read_text())
    assert plan.pop("name") == f"run-{SECRET}-part" and plan["steps"] == 17
    assert SECRET not in json.dumps(plan) and plan["rewards"]["labels"]["default"][0]["options"] == {"after": "${PART}"}


def test_no_run_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "gone"):
        error = refused(RunDir(path))
        assert "is not a run directory" in error.message and "rft train" in str(error.hint)


def test_a_state_file_that_was_lost(run: RunDir) -> None:
    """The checkpoints say where it goes on; without one, or without an attempt, it is no run."""
    stands(run, "running", step=23)
    run.state_file.unlink()
    assert not holds_run(run.path) and "is not a run directory" in refused(run).message
    newest = checkpoint(run, 20)
    found = resumption(run, step=None)
    assert holds_run(run.path) and (found.step, found.checkpoint, found.nothing_to_do) == (20, newest, False)


def test_from_the_newest_checkpoint(run: RunDir) -> None:
    plan = stands(run, "failed", step=23)
    checkpoint(run, 10)
    newest = checkpoint(run, 20)
    checkpoint(run, 25, whole=False)
    found = resumption(run, step=None)
    assert (found.plan, found.step, found.checkpoint, found.nothing_to_do) == (plan, 20, newest, False)
    assert found.text == f"{run.path}: going on after step 20 of 30 (attempt 2)"
    assert resumption(run, step=10).step == 10


def test_after_going_back_the_later_attempt_counts(run: RunDir) -> None:
    stands(run, "failed", step=20, attempt=2)
    for step, attempt in ((10, 1), (20, 2), (28, 1)):
        checkpoint(run, step, attempt=attempt)
    assert resumption(run, step=None).step == 20
    assert resumption(run, step=28).step == 28


def test_nothing_was_saved_yet(run: RunDir) -> None:
    stands(run, "failed", step=3)
    found = resumption(run, step=None)
    assert (found.step, found.checkpoint, found.nothing_to_do) == (0, None, False) and "starting over at step 1" in found.text


def test_the_last_attempts_plan_counts(run: RunDir) -> None:
    plan = stands(run, "stopped")
    longer = replace(plan, steps=99)
    stands(run, "stopped", attempt=2, plan=longer)
    assert resumption(run, step=None).plan.steps == 99


def test_a_run_that_is_done(run: RunDir) -> None:
    stands(run, "done", step=30)
    checkpoint(run, 30)
    found = resumption(run, step=None)
    assert found.nothing_to_do and "nothing is left to train" in found.text


def test_a_run_that_ended_before_its_export(run: RunDir) -> None:
    """The last checkpoint is there, final/ is not: there is still something to do."""
    stands(run, "failed", step=30)
    checkpoint(run, 30)
    found = resumption(run, step=None)
    assert not found.nothing_to_do and found.step == 30 and "nothing is left but to write final/" in found.text


def test_a_step_without_a_checkpoint(run: RunDir) -> None:
    stands(run, "failed")
    assert refused(run, step=10).hint == "whole checkpoints: none"
    for step, attempt in ((20, 2), (10, 1), (28, 1)):
        checkpoint(run, step, attempt=attempt)
    checkpoint(run, 25, whole=False)
    error = refused(run, step=25)
    assert error.message == "there is no whole checkpoint of step 25" and error.hint == "whole checkpoints: 10, 20, 28"


def test_another_number_of_ranks(run: RunDir) -> None:
    stands(run, "failed")
    checkpoint(run, 10, ranks=4)
    assert refused(run).message == "step_000010 was written by 4 ranks, the plan has 2"


def a_rank(run: RunDir, pid: int, started: str) -> None:
    (run.attempt(1).ranks / "rank_0.json").write_text(json.dumps({"pid": pid, "started": started, "time": 0.0}))


@pytest.mark.parametrize("status", ["running", "failed"])
@pytest.mark.parametrize("age_seconds", [0.0, 1e6])
def test_a_run_with_a_living_rank(run: RunDir, status: str, age_seconds: float) -> None:
    """Whatever its state says and however old its heartbeat is: a rank that still runs would write over the new attempt."""
    stands(run, status, step=4)
    run.write_state(State(status=status, step=4, attempt=1, heartbeat=time.time() - age_seconds))
    a_rank(run, os.getpid(), process_start(os.getpid()))
    error = refused(run)
    assert "is running (attempt 1, step 4)" in error.message and "stop it first" in str(error.hint)


def test_a_run_whose_ranks_are_gone(run: RunDir) -> None:
    """The state still says running, its process number belongs to somebody else by now: the run goes on at once."""
    stands(run, "running", step=4)
    a_rank(run, os.getpid(), "12345")
    assert resumption(run, step=None).step == 0


@pytest.mark.parametrize("text", ["", "{", '{"format": 99}', '{"format": 2}'])
def test_a_damaged_plan(run: RunDir, text: str) -> None:
    stands(run, "failed")
    run.attempt(1).plan.write_text(text)
    assert "cannot be read as a plan" in refused(run).message
    run.attempt(1).plan.unlink()
    assert "cannot be read as a plan" in refused(run).message


def test_a_damaged_checkpoint(run: RunDir) -> None:
    stands(run, "failed")
    (checkpoint(run, 10) / "progress.json").write_text("{")
    assert "progress.json cannot be read" in refused(run).message


def evaluate(target: Path, *sets: str, ranks: int | None = None, run_dir: Path | None = None) -> Any:
    return evaluation(target, sets, run_dir, ranks=ranks, gpus=None)


def test_what_is_evaluated(run: RunDir, tmp_path: Path) -> None:
    """A checkpoint, its policy, or a run's newest one; always into a directory of its own."""
    checkpoint(run, 10)
    newest = checkpoint(run, 20)
    for target in (newest, newest / "policy", run.path):
        job = evaluate(target, ranks=1, run_dir=tmp_path / f"eval-{target.name}")
        assert (job.checkpoint, job.step, job.what, job.plan.world.ranks) == (newest, 20, str(newest), 1)
        assert plan_from_json(job.run.plan.read_text()) == job.plan
    assert evaluate(run.checkpoints / "step_000010", ranks=1, run_dir=tmp_path / "e").step == 10
    assert evaluate(newest, ranks=2, run_dir=tmp_path / "e2").plan.world.threads_per_rank >= 1


def test_a_checkpoint_that_was_moved(run: RunDir, tmp_path: Path) -> None:
    checkpoint(run, 10).rename(tmp_path / "moved")
    job = evaluate(Path("moved"), ranks=1, run_dir=tmp_path / "e")
    assert job.checkpoint == tmp_path / "moved" and job.step == 10


def test_an_untrained_model_is_evaluated_from_its_recipe(tmp_path: Path) -> None:
    prepared()
    job = evaluate(Path("mine.yaml"), "seed=3", ranks=1)
    assert (job.checkpoint, job.step, job.plan.seed) == (None, 0, 3) and job.what == "the untrained model of mine.yaml"
    assert job.run.path.parent == tmp_path / "runs" and job.run.path.name.startswith("eval-mine-step_000000-")


def test_refusals_of_evaluation(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a whole checkpoint nor a run directory with one"):
        evaluate(run.path)
    half = checkpoint(run, 10, whole=False)
    with pytest.raises(UsageError, match="neither a whole checkpoint nor a run directory with one"):
        evaluate(half)
    whole = checkpoint(run, 20)
    with pytest.raises(UsageError, match="--set changes a recipe"):
        evaluate(whole, "seed=1")
    with pytest.raises(UsageError, match=r"holds no policy/ \(checkpoint.save_hf was false\)"):
        evaluate(checkpoint(run, 30, policy=False))
    with pytest.raises(UsageError, match=r"mine\.yaml has no evaluation sets"):
        evaluate(Path("mine.yaml"), "data.eval=null", ranks=1)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    with pytest.raises(UsageError, match="already holds"):
        evaluate(whole, ranks=1, run_dir=tmp_path / "used")
