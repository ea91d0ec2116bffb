"""Whether GPUs can share a model, and whether what is started fits into the memory that it is given: told by the plan, at the recipe's key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.plan.compile import compile_plan
from rftcli.plan.compile_parallel import fitting_numbers, key_heads, uneven
from rftcli.plan.compile_problems import CompileError
from rftcli.plan.engine_memory import engine
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts, ScorerFacts
from rftcli.plan.memory import GIB
from rftcli.plan.plan import Plan
from rftcli.recipe.load import load_text

Compiled = Callable[..., Plan]
HALF = {
    "parameters": 500_000_000, "layers": 24, "hidden": 896, "vocabulary": 151936, "max_positions": 32768,
    "heads": 14, "query_width": 896, "key_width": 128, "inner": 4864,
}  # fmt: skip
SEVENTY = {
    "parameters": 72_000_000_000, "layers": 80, "hidden": 8192, "vocabulary": 152064, "max_positions": 32768,
    "heads": 64, "query_width": 8192, "key_width": 1024, "inner": 29568,
}  # fmt: skip
RECIPE = """
models: {policy: {path: org/m}}
data: {train: {path: t.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 1}
batch: {prompts_per_step: 120}
"""
JUDGE = "{kind: generative, path: org/judge, prompt: '{{ completion }}', score: {regex: '(.)'}, placement: PLACE}"
JUDGED = "rewards={default: [{model: j}]}"


@pytest.fixture
def with_vllm(gpus: MachineFacts) -> MachineFacts:
    return replace(gpus, vllm=True)


def problems_of(compiled: Compiled, *sets: str, **facts: object) -> dict[str, tuple[str, str | None, str | None]]:
    with pytest.raises(CompileError) as caught:
        compiled(*sets, **facts)
    return {problem.path: (problem.message, problem.reason, problem.hint) for problem in caught.value.problems}


def model(heads: int, keys: int, inner: int | None = None, experts: int | None = None) -> ModelFacts:
    return ModelFacts(path="m", heads=heads, query_width=64 * heads, key_width=64 * keys, inner=inner, experts=experts)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 512), st.integers(1, 16))
def test_equal_parts_are_what_each_gpu_holds(heads: int, keys: int, inner: int, parts: int) -> None:
    whole = model(heads, keys, inner)
    held = [heads % parts == 0, keys % parts == 0 or (keys < parts and parts % keys == 0), inner % parts == 0]
    assert key_heads(whole) == keys and (uneven(whole, parts) is None) == (all(held) or parts == 1)
    assert parts in fitting_numbers(whole, 16) or not all(held)


def test_what_files_do_not_say_is_left_to_the_engine() -> None:
    assert [uneven(one, 7) for one in (None, ModelFacts(path="m"), ModelFacts(path="m", heads=14), model(7, 7, 10, experts=4))] == [None] * 4
    assert uneven(model(7, 7, 10), 7) == "the 10 numbers of its MLP cannot be cut into 7 equal parts"


@pytest.mark.parametrize(
    ("engine_name", "where", "ranks"),
    [("vllm", "{tensor_parallel: 4}", 8), ("vllm", "{tensor_parallel: 4, process: beside}", 8), ("sglang", "{tensor_parallel: 4}", 8),
     ("vllm", "{tensor_parallel: 4, server: {start: {gpus: [4, 5, 6, 7]}}}", 4)],
    ids=["inside", "beside", "sglang", "server"],
)  # fmt: skip
def test_an_engine_over_gpus_that_cannot_share_the_model_is_refused(
    compiled: Compiled, with_vllm: MachineFacts, engine_name: str, where: str, ranks: int
) -> None:
    found = problems_of(compiled, f"rollout={{engine: {engine_name}, {engine_name}: {where}}}", machine=with_vllm, ranks=ranks, **HALF)
    message, reason, hint = found[f"rollout.{engine_name}.tensor_parallel"]
    assert (message, reason, hint) == ("4 GPUs cannot share the model", "14 heads cannot be cut into 4 equal parts", "one of 1, 2")


def test_numbers_that_are_offered_serve_ranks_and_model(compiled: Compiled, with_vllm: MachineFacts) -> None:
    nine = {**HALF, "heads": 9, "query_width": 576, "key_width": 192, "inner": 1536}
    for together, ranks, wanted in ((3, 2, "1, which every model takes"), (2, 2, "1, which every model takes"), (4, 6, "one of 1, 3")):
        sets = (f"rollout={{engine: vllm, vllm: {{tensor_parallel: {together}}}}}", "batch.prompts_per_step=24")
        found = problems_of(compiled, *sets, machine=with_vllm, ranks=ranks, **nine)
        assert found["rollout.vllm.tensor_parallel"][2] == wanted


def judged(place: str, *sets: str, machine: MachineFacts, teacher: ModelFacts | None = None, ranks: int = 4) -> Plan:
    given_sets = [f"models.scorers.j={JUDGE.replace('PLACE', place)}", JUDGED, *sets] if place else list(sets)
    known = {"j": ScorerFacts(model=replace(model(14, 2, 4864), parameters=1000))}
    facts = Facts(machine=machine, model=ModelFacts(path="m", parameters=1_000_000), ranks=ranks)
    recipe = load_text(RECIPE, sets=given_sets, env={}).recipe
    return compile_plan(recipe, facts, name="n", search_path="/", policy_path="m", scorers=known if place else None, teacher=teacher)


@pytest.mark.parametrize(
    ("place", "path", "hint"),
    [("{gpus: 3}", "gpus", "`tensor_parallel: 1`, or another number of GPUs"), ("{gpus: 4, tensor_parallel: 4}", "tensor_parallel", "one of 1, 2")],
)
def test_a_judge_over_gpus_that_cannot_share_it_is_refused(with_vllm: MachineFacts, place: str, path: str, hint: str) -> None:
    found = problems_of(judged, place, machine=with_vllm)[f"models.scorers.j.placement.{path}"]
    assert found[0].endswith("GPUs cannot share org/judge") and "14 heads cannot be cut into" in str(found[1]) and found[2] == hint
    assert judged("{gpus: 2}", machine=with_vllm)


def test_a_teacher_over_gpus_that_cannot_share_it_is_refused(with_vllm: MachineFacts) -> None:
    sets = ("algorithm.advantage.kind=distill", "models.teacher={path: org/t, placement: {gpus: 4}}")
    found = problems_of(judged, "", *sets, machine=with_vllm, teacher=replace(model(14, 2), parameters=1000))
    assert found["models.teacher.placement.gpus"][2] == "one of 1, 2"


SERVED = "rollout.vllm={server: {start: {gpus: [4]}}}"


def test_a_server_that_cannot_hold_the_model_is_refused(compiled: Compiled, with_vllm: MachineFacts) -> None:
    found = problems_of(compiled, SERVED, machine=with_vllm, ranks=4, **SEVENTY)
    message, _, hint = found["rollout.vllm.server.start.gpus"]
    assert "134.1 GiB of weights" in message and "more than its 72.0 GiB of each GPU" in message
    assert hint == "more GPUs for a server: `rollout.vllm.tensor_parallel`"
    found = problems_of(compiled, SERVED, "rollout.vllm.memory_share=0.01", machine=with_vllm, ranks=4, **HALF)
    hint = str(found["rollout.vllm.memory_share"][2])
    least = float(hint.rpartition(" ")[2].rstrip("`"))
    assert compiled(SERVED, f"rollout.vllm.memory_share={least}", machine=with_vllm, ranks=4, **HALF)
    assert problems_of(compiled, SERVED, f"rollout.vllm.memory_share={least - 0.01:.2f}", machine=with_vllm, ranks=4, **HALF)
    assert compiled(SERVED, "rollout.vllm.options={quantization: fp8}", machine=with_vllm, ranks=4, **SEVENTY)


@pytest.mark.parametrize("sleep", [0, 1, "auto"])
def test_the_shares_that_are_named_fit(compiled: Compiled, with_vllm: MachineFacts, sleep: int | str) -> None:
    """And less than the least does not. More than the most may, where training then takes fewer tokens a pass."""

    def sets(share: float) -> tuple[str, str]:
        return f"rollout={{engine: vllm, vllm: {{sleep: {sleep}}}}}", f"rollout.vllm.memory_share={share:.2f}"

    for share in (0.01, 0.99):
        _, _, hint = problems_of(compiled, *sets(share), machine=with_vllm, ranks=8, **HALF)["rollout.vllm.memory_share"]
        least, most = (float(word.rstrip(",")) for word in str(hint).split() if word[0] == "0")
        assert least <= most and all(compiled(*sets(fits), machine=with_vllm, ranks=8, **HALF) for fits in (least, most))
        assert problems_of(compiled, *sets(least - 0.01), machine=with_vllm, ranks=8, **HALF)


@pytest.mark.parametrize("where", ["", ", process: beside", ", server: {start: {servers: 2}}"])
def test_a_share_without_room_for_one_sequence_is_refused_on_a_cpu(compiled: Compiled, cpu: MachineFacts, where: str) -> None:
    asked = f"rollout={{engine: vllm, vllm: {{memory_share: SHARE{where}}}}}"
    found = problems_of(compiled, asked.replace("SHARE", "0.0001"), machine=cpu, ranks=2, **HALF)
    message, _, hint = found["rollout.vllm.memory_share"]
    assert "hold no sequence of 2048 tokens" in message
    least = float(str(hint).split()[2].rstrip(","))
    plan = compiled(asked.replace("SHARE", str(least)), machine=cpu, ranks=2, **HALF)
    wanted = engine(parameters=1, number_bytes=4, layers=24, key_width=128, vocabulary=1, tensor_parallel=1, sequences=1, tokens=2048)
    assert plan.rollout.vllm is not None and 0 <= plan.rollout.vllm.cache_bytes - wanted.cache_least < 0.001 * 8 * GIB


def test_memory_that_scoring_lacks_is_told_with_the_scorer_s_keys(compiled: Compiled, with_vllm: MachineFacts) -> None:
    big = ScorerFacts(model=ModelFacts(path="m", parameters=72_000_000_000))
    facts = Facts(machine=with_vllm, model=ModelFacts(path="m", **HALF), ranks=1)
    shared_judge = JUDGE[1:-1].partition(", placement")[0]
    for scorer, keys in (("kind: classifier, path: org/rm", "models.scorers.j.quantise: {bits: 4}"), (shared_judge, "placement: {gpus: n}")):
        recipe = load_text(RECIPE, sets=[f"models.scorers.j={{{scorer}}}", JUDGED], env={}).recipe
        plan = compile_plan(recipe, facts, name="n", search_path="/", policy_path="m", scorers={"j": big})
        (note,) = (note for note in plan.notes if note.startswith("memory: expect to run out of it in score"))
        assert keys in note and "or a smaller reward model" in note and "gradient_checkpointing" not in note
