"""Differences of plans: each field of a plan has a class, and the class of a difference does not depend on what else changed."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.recipe.load import load_text
from rftcli.runtime.changes import CHANGES, FOLLOWS, FREE, IMPOSSIBLE, RISKY, Change, changes, classify, row_of

MINIMAL = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}, eval: {test: {path: test.jsonl}}}
rewards: {default: [{rule: exact}], math: [{rule: near}]}
train: {steps: 10}
"""


def plan_of(*sets: str, ranks: int = 2) -> Plan:
    facts = Facts(machine=MachineFacts(cores=4, memory_gib=16.0), model=ModelFacts(path="/m"), ranks=ranks)
    recipe = load_text(MINIMAL, sets=list(sets), env={}).recipe
    return compile_plan(recipe, facts, name="n", search_path="/", policy_path="/m")


def kinds(*sets: str, ranks: int = 2, used: tuple[str, ...] = ()) -> dict[str, str]:
    return {change.path: change.kind for change in changes(plan_of(), plan_of(*sets, ranks=ranks), used)}


def fields(hint: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of every field below a type, with `name` for the key of a mapping or the name of a list's item."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [item for item in typing.get_args(hint) if item is not type(None)]
        if type(None) in typing.get_args(hint):
            yield path
        for item in inner:
            yield from fields(item, path)
    elif dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        for field in dataclasses.fields(hint):
            yield from fields(hints[field.name], (*path, field.name))
    elif typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0]):
        yield from fields(typing.get_args(hint)[0], (*path, "name"))
    elif isinstance(typing.get_origin(hint), type) and issubclass(typing.get_origin(hint), Mapping) and typing.get_args(hint)[1] is not Any:
        yield (*path, "name")
        yield from fields(typing.get_args(hint)[1], (*path, "name"))
    else:
        yield path


EVERY_FIELD = sorted(set(fields(Plan, ())))


def test_the_walk_goes_everywhere() -> None:
    wanted = {("steps",), ("policy", "dtype"), ("reference",), ("data", "train", "name", "path"), ("rewards", "labels", "name", "name", "weight")}
    assert wanted <= set(EVERY_FIELD) and len(EVERY_FIELD) > 90


@pytest.mark.parametrize("path", EVERY_FIELD, ids=".".join)
def test_every_field_of_a_plan_has_a_class(path: tuple[str, ...]) -> None:
    """A field of the plan without a row in `CHANGES` counts as risky; say there what a change of it means."""
    assert row_of(path) is not None


def test_every_row_names_a_field() -> None:
    for pattern in CHANGES:
        head = pattern.removesuffix(".**").split(".")
        names = ["name" if piece == "*" else piece for piece in head]  # of an item of a list
        assert any(list(path[: len(head)]) == names for path in EVERY_FIELD), pattern


def test_what_is_not_known_is_risky() -> None:
    assert classify(("something", "new"))[0] == RISKY


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ((), {}),
        (("train.steps=20", "train.optimizer.schedule_steps=10"), {"steps": FREE}),
        (("checkpoint.every=3", "track.tensorboard=true", "eval.every=2"), {"checkpoint.every": FREE, "track.tensorboard": FREE, "eval.every": FREE}),
        (("train.max_hours=1",), {"max_hours": FREE}),
        (("train.optimizer.lr=1e-4",), {"learner.lr": RISKY}),
        (("train.max_grad_norm=0.5",), {"learner.max_grad_norm": RISKY}),
        (
            ("train.deepspeed.extra={zero_optimization: {overlap_comm: true}}",),
            {"learner.deepspeed.zero_optimization.overlap_comm": RISKY},
        ),
        (("rewards.default[0].weight=2",), {"rewards.labels.default.exact.weight": RISKY}),
        (("rewards.other=[{rule: exact}]",), {"rewards.labels.other": RISKY}),
        (("models.policy.dtype=bfloat16",), {"policy.dtype": IMPOSSIBLE}),
        (("seed=1",), {"seed": RISKY, "data.seed": RISKY}),
        (("rollout.temperature=0.5",), {"rollout.temperature": RISKY}),
        (("data.eval.test.path=/u.jsonl",), {"data.eval.test.path": FREE}),
        (("data.train[0].path=/u.jsonl",), {"data.train.train.path": RISKY}),
        (
            ("algorithm.kl.coefficient=0.1",),
            {"reference": RISKY, "loss.kl_coefficient": RISKY, "kl": RISKY, "batch.skip_zero_advantage": FREE},
        ),
        (("checkpoint.keep_best.metric=eval.test.mean@1",), {"checkpoint.keep_best": FREE}),
    ],
)
def test_classes(sets: tuple[str, ...], expected: dict[str, str]) -> None:
    found = kinds(*sets)
    assert {path: kind for path, kind in found.items() if path in expected} == expected
    assert set(found) - set(expected) <= {"learner.zero_stage"}  # bfloat16 starts at stage 1


def test_another_rank_count() -> None:
    found = kinds(ranks=4)
    assert found.pop("world.ranks") == RISKY
    assert all(kind == FREE for kind in found.values()), found


def test_another_model() -> None:
    other = replace(plan_of(), policy=replace(plan_of().policy, path="/other"))
    (change,) = changes(plan_of(), other)
    assert change.kind == IMPOSSIBLE and "/m -> /other" in str(change)


@pytest.mark.parametrize(("used", "kind"), [(("math",), IMPOSSIBLE), ((), FREE)])
def test_a_label_that_is_gone(used: tuple[str, ...], kind: str) -> None:
    assert kinds("rewards.math=null", used=used) == {"rewards.labels.math": kind}


def test_impossible_ones_are_shown_first_and_consequences_not_at_all() -> None:
    found = changes(plan_of(), plan_of("train.steps=20", "train.optimizer.schedule_steps=10", "train.optimizer.lr=1", "models.policy.dtype=bfloat16"))
    order = [change.kind for change in found]
    assert order == sorted(order, key=(IMPOSSIBLE, RISKY, FREE).index) and order[0] == IMPOSSIBLE and FOLLOWS not in order


def test_a_new_first_set_is_one_change() -> None:
    text: Callable[[Change], str] = str
    (change,) = changes(plan_of(), plan_of("data.train=[{name: new, path: /n.jsonl}, {name: train, path: train.jsonl}]"))
    assert (change.path, change.kind, change.before, change.after) == ("data.train.new", RISKY, "absent", "present") and "risky" in text(change)
