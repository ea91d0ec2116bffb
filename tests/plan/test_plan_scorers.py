"""Scorers of a plan: which are used, where their weights lie, what the plan says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rftcli.plan.compile import compile_plan
from rftcli.plan.compile_problems import CompileError
from rftcli.plan.compile_scorers import same_checkpoint, weights_gib
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts, ScorerFacts
from rftcli.plan.plan import Plan, plan_from_json, plan_to_json
from rftcli.plan.show import plan_text
from rftcli.recipe.load import load_text

TEXT = """\
models: {policy: {path: org/m}}
data: {train: {path: t.jsonl}}
rewards: {default: [{model: a}, {model: b, weight: 0}]}
train: {steps: 1}
"""
A, B = "models.scorers.a={kind: classifier, path: org/a}", "models.scorers.b={kind: classifier, path: org/b}"
Made = Callable[..., Plan]


def made(*sets: str, ranks: int = 8, gpu_gib: float = 80.0, **parameters: int) -> Plan:
    machine = MachineFacts(cores=64, memory_gib=512.0, gpus=8 if gpu_gib else 0, gpu_memory_gib=gpu_gib)
    facts = Facts(machine=machine, model=ModelFacts(path="m", parameters=1_000_000), ranks=ranks)
    known = {name: ScorerFacts(model=ModelFacts(path=f"/{name}", parameters=count, max_positions=100)) for name, count in parameters.items()}
    return compile_plan(load_text(TEXT, sets=[A, B, *sets], env={}).recipe, facts, name="n", search_path="/", policy_path="m", scorers=known)


def lying(plan: Plan) -> dict[str, tuple[bool, bool]]:
    return {spec.name: (spec.weights.offload, spec.weights.sharded) for spec in plan.scorers if spec.weights is not None}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1_000_000_000, 1_000_000_000, {"a": (False, False), "b": (False, False)}),  # 1.9 GiB each of 20
        (9_000_000_000, 9_000_000_000, {"a": (False, False), "b": (True, False)}),  # 16.8 GiB fit, 33.5 do not
        (12_000_000_000, 1_000_000_000, {"a": (True, False), "b": (False, False)}),  # 22.4 GiB do not, the small one does
        (30_000_000_000, 1_000_000_000, {"a": (False, True), "b": (False, False)}),  # 55.9 GiB are more than 48
    ],
)
def test_where_weights_lie(a: int, b: int, expected: dict[str, Any]) -> None:
    assert lying(made(a=a, b=b)) == expected


def test_what_is_asked_for_is_done() -> None:
    small = {"a": 1_000_000, "b": 1_000_000}
    assert lying(made("models.scorers.a.offload=true", "models.scorers.b.shard=true", **small)) == {"a": (True, False), "b": (False, True)}
    assert lying(made("models.scorers.a={offload: false, shard: false}", a=30_000_000_000, b=1)) == {"a": (False, False), "b": (False, False)}
    alone = made("models.scorers.b.shard=true", ranks=1, **small)
    assert lying(alone)["b"] == (False, False) and "models.scorers.b.shard has no effect on one rank" in alone.notes
    on_cpu = made("models.scorers.a.offload=true", gpu_gib=0.0, **small)
    assert lying(on_cpu)["a"] == (False, False) and any("scorers.a.offload has no effect" in note for note in on_cpu.notes)


def test_quantised_weights_stay_whole_and_where_they_are() -> None:
    plan = made("models.scorers.a.quantise={}", a=120_000_000_000, b=1)
    assert lying(plan)["a"] == (False, False)
    assert plan.scorers[0].weights is not None and weights_gib(plan.scorers[0].weights, 8) == pytest.approx(120e9 * 0.5 / 1024**3)


def test_one_checkpoint_counts_once() -> None:
    plan = made("models.scorers.b.path=org/a", a=6_000_000_000, b=6_000_000_000)
    again = made("models.scorers.b={path: org/a, dtype: float32}", a=6_000_000_000, b=6_000_000_000)
    plan_specs, again_specs = plan.scorers, again.scorers
    assert same_checkpoint(plan_specs[0]) != same_checkpoint(plan_specs[1])  # /a and /b: the probe says where they lie
    assert again_specs[1].weights is not None and again_specs[1].weights.dtype == "float32"
    known = ScorerFacts(model=ModelFacts(path="/same", parameters=9_000_000_000))
    machine = MachineFacts(cores=64, memory_gib=512.0, gpus=8, gpu_memory_gib=80.0)
    facts = Facts(machine=machine, model=ModelFacts(path="m"), ranks=8)
    recipe = load_text(TEXT, sets=[A, B], env={}).recipe
    shared = compile_plan(recipe, facts, name="n", search_path="/", policy_path="m", scorers={"a": known, "b": known})
    assert lying(shared) == {"a": (False, False), "b": (False, False)}
    assert "shares the weights of a" in plan_text(shared) and "16.76 GiB a rank" in plan_text(shared)


def test_training_has_what_scorers_leave() -> None:
    """2.25B parameters at stage 1 on 8 ranks: 2 + 6 bytes and an eighth of 12 each, 19.9 GiB; half of 42 GiB is enough, half of 34.5 is not."""

    def stage(count: int, *sets: str) -> int:
        machine = MachineFacts(cores=64, memory_gib=512.0, gpus=8, gpu_memory_gib=42.0)
        facts = Facts(machine=machine, model=ModelFacts(path="m", parameters=2_250_000_000), ranks=8)
        known = {name: ScorerFacts(model=ModelFacts(path=f"/{name}", parameters=count)) for name in "ab"}
        recipe = load_text(TEXT, sets=[A, B, *sets], env={}).recipe
        return compile_plan(recipe, facts, name="n", search_path="/", policy_path="m", scorers=known).learner.zero_stage

    assert stage(1) == 1 and stage(2_000_000_000) == 2
    assert stage(2_000_000_000, "models.scorers.a.offload=true", "models.scorers.b.offload=true") == 1
    own = "{kind: python, path: null, python: 'm:C', memory_gib: 7.5}"
    assert stage(1, f"models.scorers.a={own}") == 2


def test_a_scorer_that_nothing_uses_is_not_loaded() -> None:
    plan = made("models.scorers.c={kind: http, urls: ['http://x']}", a=1, b=1)
    assert [spec.name for spec in plan.scorers] == ["a", "b"]
    assert any("no reward uses `c`" in note for note in plan.notes)
    evaluated = made("models.scorers.c={kind: http, urls: ['http://x']}", "eval.rewards={default: [{model: c}]}", a=1, b=1)
    assert [spec.name for spec in evaluated.scorers] == ["a", "b", "c"]


def test_texts_beyond_the_models_positions() -> None:
    with pytest.raises(CompileError, match=r"models\.scorers\.a\.max_tokens  is 101, the model has 100 positions"):
        made("models.scorers.a.max_tokens=101", a=1, b=1)
    assert made("models.scorers.a.max_tokens=100", a=1, b=1).scorers[0].weights is not None


def test_services() -> None:
    plan = made(
        "models.scorers.a={kind: http, path: null, urls: ['http://me:secret@x/score', 'http://y'], per_minute: 60, cache: true}",
        "models.scorers.b={kind: generative, path: judge, prompt: '{{ completion }}', score: {token: yes, against: [no]}, placement: {server: 'http://z/v1'}}",
        "rollout.samples_per_prompt=6",
    )
    first, second = plan.scorers
    assert first.remote and first.batch_size == 6 and first.weights is None and first.cache
    assert second.remote and second.model == "judge" and second.max_new_tokens == 1 and second.weights is None
    text = plan_text(plan)
    assert "http at http://***@x/score, http://y, 32 requests at a time, 60 a minute, cached" in text and "secret" not in text
    assert "generative at http://z/v1, probability of `yes` against no" in text
    assert "1 x a + 0 x b" in text


def test_it_goes_through_json() -> None:
    plan = made("models.scorers.b={kind: generative, prompt: '{{ completion }}', score: {json: a.b}, quantise: {bits: 8}}", a=5, b=7)
    assert plan_from_json(plan_to_json(plan)) == plan
