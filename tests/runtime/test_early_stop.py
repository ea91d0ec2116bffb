"""When a run ends because it does not get better, what it remembers, and what a model card and a run's name say."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from rftcli.errors import RftError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import EarlyStopPlan, Plan
from rftcli.recipe.eval_rules import NAME_FIELDS
from rftcli.recipe.load import load_text
from rftcli.runtime.card import Latest, card
from rftcli.runtime.early_stop import EarlyStop
from rftcli.runtime.naming import run_name
from rftcli.runtime.world import SoloWorld

MINIMAL = """\
models: {policy: {path: org/Some Model}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}, {rule: exact, name: again, weight: 0.5}]}
train: {steps: 10}
"""


def compiled(*sets: str) -> Plan:
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=ModelFacts(path="m"), ranks=1, train_rows=100)
    return compile_plan(load_text(MINIMAL, sets=list(sets), env={}).recipe, facts, name="n", search_path="/", policy_path="m")


def watch(
    values: list[Any], *, metric: str = "eval.test.mean@1", patience: int = 2, mode: str = "max", min_delta: float = 0.0
) -> tuple[int | None, EarlyStop]:
    """(index of the value at which the run ends, the state)."""
    state = EarlyStop(plan=EarlyStopPlan(metric=metric, patience=patience, mode=mode, min_delta=min_delta), world=SoloWorld())
    for index, value in enumerate(values):
        state.see_eval(index, {"test": {} if value is None else {"mean@1": {"value": value}}})
        state.see_step(index, {"loss": value, "tokens": {"mean": value}})
        if state.reached:
            return index, state
    return None, state


@pytest.mark.parametrize(
    ("values", "options", "ends"),
    [
        ([0.1, 0.2, 0.2, 0.2], {}, 3),  # equal is not better
        ([0.1, 0.2, 0.1, 0.3, 0.2, 0.1], {}, 5),
        ([0.1, 0.2, 0.3, 0.4], {}, None),
        ([0.1, 0.15, 0.2, 0.25], {"min_delta": 0.1}, 2),  # 0.15 and 0.2 are within 0.1 of the best, 0.1
        ([3.0, 2.0, 2.5, 2.1], {"mode": "min"}, 3),
        ([0.5, float("nan"), float("nan")], {}, 2),
        ([0.5, None, None], {}, 2),
        ([1.0, 1.0], {"patience": 1}, 1),
        ([2.0, 1.0, 1.5, 1.5], {"metric": "loss", "mode": "min"}, 3),
        ([2.0, 1.0, 1.5, 1.5], {"metric": "tokens.mean"}, 2),
    ],
)
def test_patience(values: list[Any], options: dict[str, Any], ends: int | None) -> None:
    assert watch(values, **options)[0] == ends


def test_the_cause_says_what_was_best() -> None:
    _, state = watch([0.1, 0.25, 0.2, 0.2])
    assert state.cause == "stopped early: eval.test.mean@1 has not got better for 2 evaluations (best 0.25 at step 1)"
    assert EarlyStop(plan=None, world=SoloWorld()).cause is None


def test_a_resumed_run_counts_on() -> None:
    _, before = watch([0.1, 0.3, 0.2], patience=2)
    after = EarlyStop(plan=before.plan, world=SoloWorld())
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert not after.reached
    after.see_eval(3, {"test": {"mean@1": {"value": 0.3}}})
    assert after.reached and after.best == 0.3


def test_a_metric_that_never_was_is_an_error() -> None:
    state = EarlyStop(plan=EarlyStopPlan(metric="rewards_mean", patience=1, mode="max", min_delta=0.0), world=SoloWorld())
    with pytest.raises(RftError, match="no metric `rewards_mean`") as caught:
        state.see_step(1, {"reward_mean": 0.5, "kl": 0.1})
    assert caught.value.hint == "there are: kl, reward_mean"


def test_without_a_plan_nothing_is_watched() -> None:
    state = EarlyStop(plan=None, world=SoloWorld())
    state.see_step(1, {})
    assert not state.reached


def test_a_run_ends_with_the_step_that_reaches_its_tokens() -> None:
    state = EarlyStop(plan=None, world=SoloWorld(), max_tokens=100)
    for step, total, ended in ((1, 60, False), (2, 99, False), (3, 100, True)):
        state.see_step(step, {"tokens_total": total})
        assert state.reached == ended
    assert state.cause == "stopped early: 100 tokens, train.max_tokens is 100"
    resumed = EarlyStop(plan=None, world=SoloWorld(), max_tokens=150)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert not resumed.reached and resumed.cause is None  # more tokens were given to it
    resumed.see_step(4, {"tokens_total": 160})
    assert resumed.reached and compiled("train.max_tokens=7").max_tokens == 7


def test_names_from_patterns() -> None:
    recipe = load_text(MINIMAL, sets=["name='{date}-{time}_{model}+{recipe}.{seed}'", "seed=7"], env={}).recipe
    assert run_name(recipe, "gsm8k", datetime.datetime(2026, 3, 4, 5, 6, 7)) == "20260304-050607_Some-Model+gsm8k.7"
    assert run_name(load_text(MINIMAL, env={}).recipe, "gsm8k") == "gsm8k"
    for name in NAME_FIELDS:
        assert "{" not in run_name(load_text(MINIMAL, sets=[f"name='{{{name}}}'"], env={}).recipe, "r")


def test_a_card_has_the_facts() -> None:
    latest = Latest()
    latest.see_step(4, {"reward_mean": 0.75})
    latest.see_eval(4, {"test": {"mean@1": {"value": 0.5, "low": 0.25, "high": 0.75}, "prompts": 4}})
    restored = Latest()
    restored.load_state_dict(json.loads(json.dumps(latest.state_dict())))
    rows = card(compiled(), restored)
    assert rows == card(compiled(), latest)
    assert rows["base model"] == "org/Some Model" and rows["steps"] == "4 of 10" and rows["mean reward of the last step"] == "0.750"
    assert rows["reward `default`"] == "1 x exact + 0.5 x again" and rows["test: mean@1 (step 4)"] == "0.500 [0.250,0.750]"
    assert card(compiled("data.train.name='a|b'"), latest)["training data"] == "a\\|b"
    assert not [text for text in rows.values() if str(Path.cwd()) in text]
