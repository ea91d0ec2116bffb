"""Going on with another plan: --set, an edited recipe, another rank count, a fork, one command that starts or goes on. Nothing is started."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rftcli.errors import RecipeError, ResumeError, UsageError
from rftcli.events import StepDone, to_line
from rftcli.plan.plan import plan_from_json, plan_to_json
from rftcli.runtime.fork import fork
from rftcli.runtime.prepare import Prepared, prepare
from rftcli.runtime.replan import record
from rftcli.runtime.rundir import COMMITTED, RunDir, State, commit_text, step_name
from rftcli.runtime.start import create, holds_run, resumption

RECIPE = """\
models: {policy: {path: 'builtin:quickstart'}}
data:
  train: {path: rows.jsonl}
rollout: {max_prompt_tokens: 24, max_new_tokens: 24}
rewards: {default: [{rule: exact}], spare: [{rule: think_format}]}
batch: {prompts_per_step: 4}
train: {steps: 30, optimizer: {schedule: cosine}}
"""


pytestmark = pytest.mark.usefixtures("eight_rows")


def prepared(*sets: str, text: str = RECIPE, ranks: int = 2) -> Prepared:
    Path("mine.yaml").write_text(text)
    return prepare(Path("mine.yaml"), sets, ranks=ranks, gpus=None)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that stopped after step 5 of 30, with a checkpoint; its steps had rows of the label `default`."""
    return stopped(tmp_path / "run", "train.max_grad_norm=0.5")


def stopped(path: Path, *sets: str) -> RunDir:
    made = create(prepared(*sets), path)
    made.attempt(1).create()
    made.attempt(1).plan.write_text(made.plan.read_text())
    made.write_state(State(status="stopped", step=5, attempt=1, heartbeat=time.time()))
    made.events.write_text(to_line(StepDone(time=0.0, attempt=1, step=5, metrics={"labels": {"default": 0.5}})) + "\n")
    checkpoint(made, 5)
    return made


def checkpoint(run: RunDir, step: int, *, ranks: int = 2, trainer: bool = True) -> Path:
    folder = run.checkpoints / step_name(step)
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "weights").write_text("w")
    if trainer:
        (folder / "trainer").mkdir()
    (folder / "progress.json").write_text(json.dumps({"step": step, "plan": "", "ranks": ranks, "state": {}}))
    (folder / "plan.json").write_text(run.plan.read_text())
    (folder / COMMITTED).write_text(commit_text(step, 1))
    return folder


def asked(run: RunDir, *sets: str, **arguments: Any) -> dict[str, str]:
    return {change.path: change.kind for change in resumption(run, step=None, sets=sets, **arguments).changes}


def test_without_a_change_the_plan_is_the_last_attempts(run: RunDir) -> None:
    found = resumption(run, step=None)
    assert found.plan == plan_from_json(run.plan.read_text()) and not found.changes and found.resolved is None


def test_more_steps_are_free_and_the_schedule_keeps_its_horizon(run: RunDir) -> None:
    found = resumption(run, step=None, sets=["train.steps=60"])
    assert [(change.path, change.before, change.after) for change in found.changes] == [("steps", "30", "60")]
    assert found.plan.steps == 60 and found.plan.learner.schedule_updates == 30
    assert found.plan.learner.max_grad_norm == 0.5  # what was on the first command line still holds
    assert resumption(run, step=None, sets=["train.steps=60", "train.optimizer.schedule_steps=60"], accept=True).plan.learner.schedule_updates == 60


def test_a_critics_schedule_keeps_its_horizon_too(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run", "models.critic={optimizer: {schedule: linear}}", "algorithm.advantage.kind=gae")
    found = resumption(run, step=None, sets=["train.steps=60"])
    assert [change.path for change in found.changes] == ["steps"]
    assert found.plan.critic is not None and found.plan.critic.learner.schedule_updates == 30
    longer = resumption(run, step=None, sets=["train.steps=60", "models.critic.optimizer.schedule_steps=60"], accept=True)
    assert longer.plan.critic is not None and longer.plan.critic.learner.schedule_updates == 60
    assert longer.plan.learner.schedule_updates == 30


def test_risky_changes_need_a_yes(run: RunDir) -> None:
    with pytest.raises(ResumeError, match=r"learner\.lr: 1e-06 -> 1e-05") as caught:
        resumption(run, step=None, sets=["train.optimizer.lr=1e-5"])
    assert caught.value.exit_code == 4 and "--accept" in str(caught.value.hint)
    assert asked(run, "train.optimizer.lr=1e-5", accept=True) == {"learner.lr": "risky"}


def test_impossible_changes_are_refused_with_the_difference(run: RunDir) -> None:
    with pytest.raises(ResumeError, match=r"impossible policy\.dtype: float32 -> bfloat16") as caught:
        resumption(run, step=None, sets=["models.policy.dtype=bfloat16", "train.deepspeed.zero_stage=1"], accept=True)
    assert caught.value.exit_code == 4


def test_a_label_that_was_rewarded_cannot_go(run: RunDir) -> None:
    assert asked(run, "rewards.spare=null") == {"rewards.labels.spare": "free"}
    with pytest.raises(ResumeError, match=r"data\.train\[0\]  rows without a label need an entry `default`"):
        resumption(run, step=None, sets=["rewards.default=null"], accept=True)
    # the data has no such rows any more, but the run has learnt from them
    with pytest.raises(ResumeError, match=r"rewards\.labels\.default: present -> absent"):
        resumption(run, step=None, sets=["rewards.default=null", "data.train[0].label=spare"], accept=True)


def test_a_mistake_is_shown_as_in_any_recipe(run: RunDir) -> None:
    with pytest.raises(RecipeError, match="did you mean `lr`"):
        resumption(run, step=None, sets=["train.optimizer.lrr=1"])


def test_the_copy_of_the_recipe_may_be_edited(run: RunDir) -> None:
    """It is read as if it stood where it came from, with what was on the first command line."""
    run.recipe.write_text(RECIPE.replace("steps: 30", "steps: 40"))
    found = resumption(run, step=None)
    assert [change.path for change in found.changes] == ["steps"] and found.plan.learner.max_grad_norm == 0.5
    assert found.plan.data == plan_from_json(run.plan.read_text()).data  # `rows.jsonl` lies beside the recipe, not beside its copy
    record(run, 2, 5, found.changes, accept=False)
    run.attempt(2).create()
    run.attempt(2).plan.write_text(plan_to_json(found.plan))
    again = resumption(run, step=None)
    assert not again.changes and again.plan == found.plan
    assert json.loads(run.manifest.read_text())["resumed_with"][0]["attempt"] == 2


def test_an_edited_resolved_recipe_counts_too(run: RunDir) -> None:
    run.resolved.write_text(run.resolved.read_text().replace("steps: 30", "steps: 35"))
    assert asked(run) == {"steps": "free"}


def test_what_was_accepted_is_the_ground_for_the_next_change(run: RunDir) -> None:
    found = resumption(run, step=None, sets=["train.optimizer.lr=1e-5"], accept=True)
    run.attempt(2).create()
    run.attempt(2).plan.write_text(plan_to_json(found.plan))
    assert found.resolved is not None
    (run.attempt(2).path / run.resolved.name).write_text(found.resolved)
    assert asked(run, "train.steps=31") == {"steps": "free"}


def test_another_rank_count(run: RunDir) -> None:
    with pytest.raises(ResumeError, match=r"world\.ranks: 2 -> 1"):
        resumption(run, step=None, ranks=1)
    found = resumption(run, step=None, ranks=1, accept=True)
    assert found.plan.world.ranks == 1 and found.accept
    # the attempt was killed before it wrote a checkpoint of its own: what was accepted holds for the next one
    run.attempt(2).create()
    run.attempt(2).plan.write_text(plan_to_json(found.plan))
    with pytest.raises(ResumeError, match="written by 2 ranks"):
        resumption(run, step=None)
    run.attempt(2).launch.write_text(json.dumps({"job": {"mode": "train", "accept": True, "checkpoint": str(found.checkpoint)}}))
    assert resumption(run, step=None).accept


def test_a_checkpoint_without_trainer_state(run: RunDir) -> None:
    folder = checkpoint(run, 6, trainer=False)
    with pytest.raises(ResumeError, match="no trainer state"):
        resumption(run, step=None)
    assert resumption(run, step=None, accept=True).checkpoint == folder
    assert resumption(run, step=5).step == 5


def test_a_run_that_is_done_can_be_made_longer(run: RunDir) -> None:
    checkpoint(run, 30)
    run.write_state(State(status="done", step=30, attempt=1))
    assert resumption(run, step=None).nothing_to_do
    longer = resumption(run, step=None, sets=["train.steps=31"])
    assert not longer.nothing_to_do and longer.step == 30


def test_a_fork_starts_from_the_checkpoint_and_leaves_the_run_alone(run: RunDir, tmp_path: Path) -> None:
    def everything() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}

    before = everything()
    found = resumption(run, step=None, sets=["train.optimizer.lr=1e-5"], accept=True, to_fork=True)
    new, there = fork(run, found, "other")
    assert everything() == before
    assert new.path == tmp_path / "other" and there.step == 5 and there.checkpoint == new.checkpoints / "step_000005"
    assert json.loads(new.manifest.read_text())["forked_from"]["run"] == str(run.path)
    assert plan_from_json(new.plan.read_text()).learner.lr == 1e-5
    assert resumption(new, step=None).step == 5  # killed before its first checkpoint, it goes on from there too
    (run.checkpoints / "step_000005" / "policy" / "weights").unlink()
    assert (new.checkpoints / "step_000005" / "policy" / "weights").read_text() == "w"
    with pytest.raises(UsageError, match="already holds something"):
        fork(run, found, "other")


def test_a_fork_needs_something_to_do(run: RunDir) -> None:
    checkpoint(run, 30)
    with pytest.raises(ResumeError, match=r"train\.steps"):
        fork(run, resumption(run, step=None, to_fork=True), "other")


def test_one_command_that_starts_or_goes_on(run: RunDir, tmp_path: Path) -> None:
    assert holds_run(run.path) and not holds_run(tmp_path / "nothing")
    same = prepared("train.max_grad_norm=0.5")
    assert resumption(run, step=None, prepared=same).changes == ()
    with pytest.raises(ResumeError, match="max_grad_norm"):
        resumption(run, step=None, prepared=prepared())


def test_a_directory_whose_making_was_cut_short_is_made_again(tmp_path: Path) -> None:
    half = create(prepared(), tmp_path / "half")
    half.manifest.unlink()
    with pytest.raises(UsageError):
        create(prepared(), tmp_path / "half")
    assert create(prepared(), tmp_path / "half", again=True).manifest.is_file()
    (tmp_path / "half" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError):
        create(prepared(), tmp_path / "half", again=True)


def test_a_secret_that_was_laid_on_a_recipe_is_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "f00dfeedf00dfeed")
    made = create(prepared("name=f00dfeedf00dfeed"), tmp_path / "secret")
    assert "f00dfeed" not in made.manifest.read_text()
    made.write_state(State(status="stopped", step=0, attempt=0, heartbeat=time.time()))
    made.recipe.write_text(made.recipe.read_text().replace("steps: 30", "steps: 40"))
    with pytest.raises(ResumeError, match="held a secret"):
        resumption(made, step=None)
