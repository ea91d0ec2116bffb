"""A plan is one text: it comes back equal, has one hash, and what is no plan is refused with the field that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rftcli.errors import UsageError
from rftcli.plan.facts import MachineFacts
from rftcli.plan.plan import PLAN_FORMAT, Plan, plan_from_json, plan_hash, plan_to_json

Compiled = Callable[..., Plan]
RICH = (
    "data.train=[{python: 'a:b', options: {n: 1, deep: {list: [1, 2.5, null, x]}}}, {path: /x.jsonl}]",
    "data.eval={one: {path: /y.jsonl}, two: {path: /z.jsonl, columns: {id: key}}}",
    "models.policy.chat={prefill: <think>, options: {thinking: true}}",
    "rollout.stop=['\\n\\n', \"\\u00fc\"]",
    "algorithm.kl.coefficient=0.1",
    "algorithm.loss.dual_clip=3",
    "train.max_grad_norm=null",
    "eval.pass_k=[1]",
    "track.wandb={tags: [a, b]}",
    "track.tensorboard=true",
)


@pytest.fixture
def plans(compiled: Compiled, gpus: MachineFacts) -> list[Plan]:
    return [compiled(), compiled(*RICH, parameters=7), compiled("train.deepspeed.zero_stage=3", ranks=8, machine=gpus, parameters=10_000_000_000)]


def test_round_trip(plans: list[Plan]) -> None:
    for plan in plans:
        again = plan_from_json(plan_to_json(plan))
        assert again == plan
        assert plan_to_json(again) == plan_to_json(plan) and plan_hash(again) == plan_hash(plan)


def test_labels_round_trip(compiled: Compiled) -> None:
    plan = compiled("data.train.label=math", "rewards={default: null, math: [{rule: exact, options: {after: '####'}}, {python: 'm:f', weight: -1}]}")
    assert plan_from_json(plan_to_json(plan)) == plan and list(plan.rewards.labels) == ["math"]


def test_the_text_is_readable_and_ordered(compiled: Compiled) -> None:
    text = plan_to_json(compiled("models.policy.chat.system=grüße"))
    data = json.loads(text)
    assert text.endswith("}\n") and "grüße" in text and list(data) == sorted(data)
    assert data["format"] == PLAN_FORMAT


def test_the_hash_is_over_everything(plans: list[Plan]) -> None:
    hashes = {plan_hash(plan) for plan in plans}
    assert len(hashes) == 3 and all(len(item) == 16 and int(item, 16) >= 0 for item in hashes)
    plan = plans[0]
    for changed in (replace(plan, seed=1), replace(plan, notes=("x",)), replace(plan, world=replace(plan.world, ranks=2))):
        assert plan_hash(changed) != plan_hash(plan)


def damaged(plan: Plan, path: tuple[str, ...], value: Any) -> str:
    data = json.loads(plan_to_json(plan))
    here = data
    for name in path[:-1]:
        here = here[name]
    here[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), PLAN_FORMAT - 1, f"not a plan of format {PLAN_FORMAT}"),
        (("steps",), "ten", "Plan.steps: expected an integer, got str"),
        (("steps",), None, "Plan.steps: expected an integer, got null"),
        (("notes",), None, "Plan.notes: expected a list, got null"),
        (("seeds",), 0, r"unknown fields \['seeds'\]"),
        (("learner", "betas"), [0.9], "Plan.learner.betas: expected 2 values, got 1"),
        (("learner", "lr"), "1e-6", "Plan.learner.lr: expected a number, got str"),
        (("rollout", "stop"), "x", "Plan.rollout.stop: expected a list, got str"),
        (("rewards", "labels"), [], "Plan.rewards.labels: expected a mapping, got list"),
        (("data", "shuffle"), 1, "Plan.data.shuffle: expected true or false, got int"),
    ],
)
def test_what_is_no_plan_names_the_field(compiled: Compiled, path: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_from_json(damaged(compiled(), path, value))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", f'{{"format": {PLAN_FORMAT}}}'])
def test_what_is_no_plan_at_all(text: str) -> None:
    with pytest.raises(ValueError):
        plan_from_json(text)


def test_records_inside_a_plan_check_themselves(compiled: Compiled) -> None:
    """A set that was edited to have neither a file nor a function is a mistake of the person, not of this program."""
    data = json.loads(plan_to_json(compiled()))
    data["data"]["train"][0]["path"] = None
    with pytest.raises(UsageError, match="exactly one of `path` and `python`"):
        plan_from_json(json.dumps(data))
