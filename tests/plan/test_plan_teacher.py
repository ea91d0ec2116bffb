"""Teachers and estimators in a plan: what is loaded, what the update needs first, and what a person is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan, plan_from_json, plan_to_json
from rftcli.plan.show_models import model_rows
from rftcli.recipe.load import load_text

Compiled = Callable[..., Plan]
RECIPE = """\
models: {policy: {path: org/model, lora: {rank: 4}, dropout: 0.1}, teacher: {path: org/large}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 10}
"""


def taught(machine: MachineFacts, *sets: str, parameters: int | None = 32_000_000_000) -> Plan:
    facts = Facts(machine=machine, model=ModelFacts(path="/m", parameters=1_000_000_000), ranks=1, train_rows=100)
    teacher = ModelFacts(path="/large", revision="abc", parameters=parameters)
    recipe = load_text(RECIPE, sets=list(sets), env={}).recipe
    return compile_plan(recipe, facts, name="n", search_path="/", policy_path="/m", teacher=teacher)


def test_a_teacher_is_loaded_whole(cpu: MachineFacts) -> None:
    plan = taught(cpu)
    assert plan.teacher is not None and plan.teacher.server is None and not plan.teacher.offload
    model = plan.teacher.model
    assert model is not None and (model.path, model.given, model.revision, model.parameters) == ("/large", "org/large", "abc", 32_000_000_000)
    assert (model.lora, model.dropout, model.dtype, model.tokenizer) == (None, 0.0, "float32", None)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert ("teacher", "org/large, float32") in model_rows(plan)
    assert plan.batch.needs_prepass == "the teacher's log-probs are compared with those at rollout time"


def test_a_large_teacher_waits_in_cpu_memory(cpu: MachineFacts, gpus: MachineFacts) -> None:
    """A quarter of 80 GiB holds 10 billion parameters in bfloat16, not 32."""
    plan = taught(gpus)
    assert plan.teacher is not None and plan.teacher.offload and any("the teacher waits in CPU memory" in note for note in plan.notes)
    small = taught(gpus, parameters=1_000_000_000)
    assert small.teacher is not None and not small.teacher.offload
    held = taught(gpus, "models.teacher.offload=false")
    assert held.teacher is not None and not held.teacher.offload
    idle = taught(cpu, "models.teacher.offload=true")
    assert idle.teacher is not None and not idle.teacher.offload and any("models.teacher.offload has no effect" in note for note in idle.notes)
    assert taught(gpus, "models.teacher.dtype=float32").teacher.model.dtype == "float32"  # type: ignore[union-attr]


def test_alone_or_added(cpu: MachineFacts) -> None:
    added = taught(cpu, "algorithm.advantage.distill_coefficient=0.5").advantage
    assert (added.kind, added.teacher_coefficient, added.per_token) == ("grpo", 0.5, False)
    alone = taught(cpu, "algorithm.advantage={kind: distill, distill_coefficient: 0.5}").advantage
    assert (alone.teacher_coefficient, alone.per_token, alone.options) == (None, True, {"coefficient": 0.5})


def test_a_teacher_behind_a_server(compiled: Compiled) -> None:
    plan = compiled("models.teacher={server: 'http://h:1', api: sglang, served_model: big, headers_env: {Authorization: KEY}}")
    assert plan.teacher is not None and plan.teacher.model is None and plan.teacher.server is not None
    server = plan.teacher.server
    assert (server.url, server.api, server.model, dict(server.headers_env)) == ("http://h:1", "sglang", "big", {"Authorization": "KEY"})
    assert ("teacher", "big at http://h:1 (sglang)") in model_rows(plan)
    assert compiled().teacher is None and not [name for name, _ in model_rows(compiled()) if name == "teacher"]


@pytest.mark.parametrize(
    ("sets", "note"),
    [
        (("algorithm.advantage.kind=cpgd",), "`cpgd` is meant for `algorithm.loss.kind: cpg`, and the loss is `ppo_clip`"),
        (("algorithm.advantage.kind=gpg",), "`gpg` is meant for `algorithm.loss.kind: reinforce`, and the loss is `ppo_clip`"),
        (
            ("algorithm.advantage.kind=reinforce_pp_baseline", "algorithm.kl.coefficient=0.1"),
            "`place: loss` and `estimator: k2`; here it is k3 in the loss",
        ),
        (
            ("algorithm.advantage.kind=reinforce_pp", "algorithm.kl.coefficient=0.1"),
            "`place: reward`, for each token; here the KL term is in the loss",
        ),
        (("algorithm.advantage.kind=reinforce_pp_baseline", "algorithm.kl={coefficient: 0.1, estimator: k2}"), None),
        (("algorithm.advantage.kind=reinforce_pp", "algorithm.kl={coefficient: 0.1, estimator: k1, place: reward}"), None),
        (("algorithm.advantage.kind=opo",), None),
    ],
)
def test_what_differs_from_an_estimators_source_is_said(compiled: Compiled, sets: tuple[str, ...], note: str | None) -> None:
    about = [text for text in compiled(*sets).notes if text.startswith(("algorithm.advantage", "algorithm.kl:"))]
    assert about == [] if note is None else len(about) == 1 and note in about[0]


def test_options_of_estimators(compiled: Compiled) -> None:
    def options(written: str) -> object:
        return compiled(f"algorithm.advantage={written}").advantage.options

    assert options("{kind: grpo, min_std: 0.1}") == {"normalise_std": True, "std": "group", "min_std": 0.1}
    assert options("{kind: reinforce, baseline: batch}") == {"baseline": "batch"}
    assert options("{kind: reinforce, baseline: batch, gamma: 0.5}") == {"baseline": "batch", "gamma": 0.5}
    assert options("{kind: grpo_passk, passk_std: true}") == {"normalise_std": True}
    assert options("{kind: grpo_passk}") == {"normalise_std": False}
    assert options("{kind: python, python: 'a:b', options: {n: 1}}") == {"n": 1}
    assert [options(f"{{kind: {kind}}}") for kind in ("rloo", "opo", "gpg", "gdpo", "cpgd", "remax", "reinforce_pp", "reinforce_pp_baseline")] == [
        {}
    ] * 8
    level = compiled("algorithm.advantage.kind=reinforce_pp", "algorithm.kl={coefficient: 0.1, estimator: k1, place: reward}").kl
    assert level is not None and level.level == "token"
