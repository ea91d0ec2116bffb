"""Judges with GPUs of their own: whose is which, what is refused with the arithmetic, what the plan says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rftcli.plan.compile import compile_plan
from rftcli.plan.compile_problems import CompileError
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts, ScorerFacts
from rftcli.plan.plan import Plan, plan_from_json, plan_to_json
from rftcli.plan.show import plan_text
from rftcli.recipe.load import load_text
from rftcli.rewards.scorers.spec import StartSpec

RECIPE = """\
models: {policy: {path: org/m}}
data: {train: {path: t.jsonl}}
train: {steps: 1}
batch: {prompts_per_step: 120}
"""
MACHINE = MachineFacts(cores=64, memory_gib=512.0, gpus=8, gpu_memory_gib=80.0, vllm=True)
CPU = MachineFacts(cores=8, memory_gib=40.0)
Judged = Callable[..., Plan]


def judge(gpus: int, *more: str, path: str = "org/judge") -> str:
    place = ", ".join((f"gpus: {gpus}", *more))
    return f"{{kind: generative, path: {path}, prompt: '{{{{ completion }}}}', score: {{regex: '(.)'}}, placement: {{{place}}}}}"


def checkpoint(text: str) -> str:
    return text.partition("path: ")[2].partition(",")[0]


def planned(*sets: str, ranks: int = 4, nodes: int = 1, machine: MachineFacts = MACHINE, parameters: int | None = None, **judges: str) -> Plan:
    parts = ", ".join(f"{{model: {name}}}" for name in judges)
    found = [f"models.scorers.{name}={text}" for name, text in judges.items()]
    recipe = load_text(RECIPE, sets=[f"rewards={{default: [{parts}]}}", *found, *sets], env={}).recipe
    known = {name: ScorerFacts(model=ModelFacts(path=f"/models/{checkpoint(text)}", parameters=parameters)) for name, text in judges.items()}
    facts = Facts(machine=machine, model=ModelFacts(path="m", parameters=1_000_000), ranks=ranks, nodes=nodes)
    return compile_plan(recipe, facts, name="n", search_path="/", policy_path="m", scorers=known)


def starts(plan: Plan) -> dict[str, StartSpec]:
    return {spec.name: spec.start for spec in plan.scorers if spec.start is not None}


def gpus(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: start.gpus for name, start in starts(plan).items()}


def refused(**asked: Any) -> dict[str, tuple[str, str | None]]:
    sets = asked.pop("sets", ())
    with pytest.raises(CompileError) as caught:
        planned(*sets, **asked)
    return {problem.path: (problem.message, problem.hint) for problem in caught.value.problems}


def test_judges_have_the_gpus_behind_the_ranks_in_order() -> None:
    plan = planned(a=judge(2), b=judge(1, path="org/other"))
    assert gpus(plan) == {"a": (4, 5), "b": (6,)}
    start = starts(plan)["a"]
    assert (start.servers, start.tensor_parallel, start.memory_share, start.dtype, start.path) == (1, 2, 0.9, "bfloat16", "/models/org/judge")
    assert all(spec.weights is None and spec.remote and spec.service is not None and spec.service.urls == () for spec in plan.scorers)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_several_servers_of_one_judge() -> None:
    plan = planned(a=judge(4, "tensor_parallel: 2", "memory_share: 0.5"))
    start = starts(plan)["a"]
    assert (start.servers, start.tensor_parallel, start.gpus, start.memory_share) == (2, 2, (4, 5, 6, 7), 0.5)
    text = plan_text(plan)
    assert "2 vLLM servers of 2 GPUs each of its own on GPUs 4, 5, 6, 7 of the first rank's machine, started by the run, 50% of the memory" in text


def test_one_checkpoint_under_two_names_is_served_once() -> None:
    plan = planned("models.scorers.b.score.regex='(..)'", a=judge(2), b=judge(2), c=judge(2, "options: {max_num_seqs: 9}"))
    assert gpus(plan) == {"a": (4, 5), "b": (4, 5), "c": (6, 7)}
    assert "shares the server of a" in plan_text(plan)


def test_the_policys_server_keeps_its_own() -> None:
    engine = "rollout={engine: vllm, vllm: {server: {start: {gpus: [4]}}}}"
    assert gpus(planned(engine, a=judge(3))) == {"a": (5, 6, 7)}
    message, hint = refused(sets=[engine], a=judge(2), b=judge(2, path="org/other"))["models.scorers.b.placement.gpus"]
    assert message == "asks for 2 GPUs; of the machine's 8: 4 train, 1 of `rollout.vllm.server.start` sample, judge `a` has 2, 1 are free"
    assert hint is not None and hint.startswith("`--gpus 3` trains on fewer")
    assert gpus(planned("rollout={engine: hf, vllm: {server: {start: {gpus: [4]}}}}", a=judge(4))) == {"a": (4, 5, 6, 7)}  # it is not started


def test_too_few_gpus_are_told_with_the_arithmetic() -> None:
    message, hint = refused(ranks=8, a=judge(2))["models.scorers.a.placement.gpus"]
    assert message == "asks for 2 GPUs; of the machine's 8: 8 train, 0 are free" and str(hint).startswith("`--gpus 6` trains on fewer")
    message, hint = refused(ranks=1, machine=replace(MACHINE, gpus=1), a=judge(1))["models.scorers.a.placement.gpus"]
    assert message == "asks for 1 GPU; of the machine's 1: 1 train, 0 are free" and str(hint).startswith("fewer `gpus`")


def test_on_several_machines_the_first_one_has_the_judges() -> None:
    assert gpus(planned(ranks=12, nodes=2, a=judge(2))) == {"a": (6, 7)}
    message, _ = refused(ranks=16, nodes=2, a=judge(1))["models.scorers.a.placement.gpus"]
    assert "8 train, 0 are free" in message


def test_on_a_cpu() -> None:
    plan = planned(ranks=2, machine=CPU, a=judge(0), b=judge(0, "memory_share: 0.5"))
    assert {name: (start.gpus, start.dtype) for name, start in starts(plan).items()} == {"a": ((), "float32"), "b": ((), "float32")}
    assert [(start.cache_bytes or 0) >> 30 for start in starts(plan).values()] == [4, 20]
    assert "a vLLM server of its own on the CPU of the first rank's machine, started by the run, 4.00 GiB of cache" in plan_text(plan)
    message, hint = refused(machine=CPU, ranks=1, a=judge(2))["models.scorers.a.placement.gpus"]
    assert message == "asks for 2 GPUs, and this run is on a CPU" and "`gpus: 0`" in str(hint)
    message, hint = refused(a=judge(0))["models.scorers.a.placement.gpus"]
    assert message == "names no GPU, and the ranks train on GPUs" and "`--gpus 7`" in str(hint)


def test_weights_that_cannot_fit_are_refused() -> None:
    big = 70_000_000_000
    message, hint = refused(parameters=big, a=judge(1))["models.scorers.a.placement.gpus"]
    assert message == "the weights of org/judge take 130.4 GiB on one GPU, where the server may have 72.0 GiB" and "quantization" in str(hint)
    assert "on each of 2 GPUs" not in message
    assert gpus(planned(parameters=big, a=judge(2))) == {"a": (4, 5)}
    assert "65.2 GiB on each of 2 GPUs" in refused(parameters=big, a=judge(2, "memory_share: 0.6"))["models.scorers.a.placement.gpus"][0]
    assert gpus(planned(parameters=big, a=judge(1, "options: {quantization: fp8}"))) == {"a": (4,)}


def test_files_that_vllm_does_not_read() -> None:
    message, hint = refused(a=judge(1, path="org/judge.gguf"))["models.scorers.a.path"]
    assert message == "org/judge.gguf is a GGUF file, which vLLM does not read" and "inside the ranks" in str(hint)


def test_longest_question_and_reply() -> None:
    lengths = ("models.scorers.a.max_tokens=1000", "models.scorers.a.max_new_tokens=24")
    assert starts(planned(*lengths, a=judge(1)))["a"].max_model_tokens == 1024
    assert starts(planned(a=judge(1)))["a"].max_model_tokens is None


# beside the ranks

WIDTHS = {"layers": 32, "hidden": 4096, "vocabulary": 128_000, "key_width": 1024, "max_positions": 131_072}
BESIDE = "{kind: generative, path: org/judge, prompt: '{{ completion }}', score: {regex: '(.)'}, engine: vllm"


def beside(*more: str, machine: MachineFacts = MACHINE, parameters: int | None = 8_000_000_000, **widths: int) -> Plan:
    recipe = load_text(RECIPE, sets=["rewards={default: [{model: j}]}", f"models.scorers.j={', '.join((BESIDE, *more))}}}"], env={}).recipe
    facts = Facts(machine=machine, model=ModelFacts(path="m", parameters=1_000_000, **WIDTHS), ranks=4)
    known = {"j": ScorerFacts(model=ModelFacts(path="/judge", parameters=parameters, **{**WIDTHS, **widths}))}
    return compile_plan(recipe, facts, name="n", search_path="/", policy_path="m", scorers=known)


def test_a_judge_beside_the_ranks_takes_its_share_of_their_devices() -> None:
    """8B weights in bfloat16, 14.9 GiB; 16384 positions of 2 x 32 x 1024 numbers of 2 bytes, 2 GiB; with 5% and the context 18.25 GiB."""
    (spec,) = beside().scorers
    assert spec.start is not None and spec.weights is not None and not spec.remote
    start = spec.start
    assert (start.beside, start.sleeps, start.gpus, start.max_model_tokens, start.memory_share) == (True, False, (), 16384, 0.23)
    assert start.cache_bytes == pytest.approx(1.05 * 2 * 2**30, abs=1) and spec.weights.beside_gib == pytest.approx(2.1 + 1.25)
    plan = beside()
    held = next(row for row in plan.memory.rows if row.name == "reward models")
    assert held.gib["learn"] == held.gib["score"] == pytest.approx(8e9 * 2 / 2**30 + 3.35)
    assert "vLLM in a process beside each rank, 18.25 GiB a rank" in plan_text(plan)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_it_sleeps_where_the_device_would_be_too_full() -> None:
    plan = beside("batch_tokens: 65536")  # 24.5 GiB, more than a quarter of 80
    (spec,) = plan.scorers
    assert spec.start is not None and spec.start.sleeps
    held = next(row for row in plan.memory.rows if row.name == "reward models")
    assert "learn" not in held.gib and held.gib["score"] == pytest.approx(8e9 * 2 / 2**30 + 8.4 + 1.25)
    assert any(note.startswith("scorer `j` waits in CPU memory between uses") for note in plan.notes)
    awake = beside("batch_tokens: 65536", "offload: false").scorers[0].start
    assert awake is not None and not awake.sleeps
    on_cpu = beside(machine=CPU).scorers[0].start
    assert on_cpu is not None and not on_cpu.sleeps and on_cpu.memory_share is None and on_cpu.cache_bytes == pytest.approx(1.05 * 4 * 2**30, abs=1)


def test_questions_and_replies_beyond_the_models_positions() -> None:
    """vLLM would refuse them when its server starts."""
    words = "max_tokens 2000 + max_new_tokens 49 = 2049 positions, the model has 2048"
    with pytest.raises(CompileError) as caught:
        beside("max_tokens: 2000", "max_new_tokens: 49", max_positions=2048)
    assert [(problem.path, problem.message) for problem in caught.value.problems] == [("models.scorers.j.max_tokens", words)]
    assert beside("max_tokens: 2000", "max_new_tokens: 48", max_positions=2048).scorers
    assert beside("max_tokens: 2000", "max_new_tokens: 49", "options: {hf_overrides: {max_position_embeddings: 4096}}", max_positions=2048).scorers


def test_what_its_cache_holds() -> None:
    assert [spec.start.max_model_tokens for spec in beside(max_positions=2048).scorers if spec.start] == [2048]
    (spec,) = beside("max_tokens: 20000", "max_new_tokens: 480").scorers
    assert spec.start is not None and spec.start.max_model_tokens == 20480 and spec.start.cache_bytes == pytest.approx(1.05 * 2.5 * 2**30, abs=1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"parameters": None}, "the judge's size is not known, and with it its share of the device"),
        ({"parameters": 70_000_000_000}, "the judge takes 133.7 GiB, a GPU has 80.0 GiB"),
    ],
)
def test_judges_that_have_no_place_beside_the_ranks(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError) as caught:
        beside(**asked)
    (problem,) = (one for one in caught.value.problems if one.path == "models.scorers.j.engine")
    assert problem.message == message and "`placement: {gpus: n}`" in str(problem.hint)


# a teacher


def taught(*place: str, judge_gpus: int = 0, ranks: int = 4, **known: Any) -> Plan:
    sets = [f"models.teacher={{path: org/t, placement: {{{', '.join(place)}}}}}", "algorithm.advantage.kind=distill"]
    sets += [f"models.scorers.j={judge(judge_gpus)}", "rewards={default: [{model: j}]}"] if judge_gpus else ["rewards={default: [{rule: exact}]}"]
    recipe = load_text(RECIPE, sets=sets, env={}).recipe
    facts = Facts(machine=MACHINE, model=ModelFacts(path="m", parameters=1_000_000, **WIDTHS), ranks=ranks)
    teacher = ModelFacts(path="/t", **{"parameters": 32_000_000_000, "revision": "abc", **known})
    return compile_plan(recipe, facts, name="n", search_path="/", policy_path="m", teacher=teacher)


def test_a_teacher_has_gpus_of_its_own_before_judges() -> None:
    plan = taught("gpus: 2", judge_gpus=1)
    assert plan.teacher is not None and plan.teacher.start is not None and plan.teacher.server is not None
    start = plan.teacher.start
    assert (start.gpus, start.servers, start.tensor_parallel, start.path, start.revision, start.dtype) == ((4, 5), 1, 2, "/t", "abc", "bfloat16")
    assert start.max_model_tokens == 1024 + 1024 + 1 and gpus(plan) == {"j": (6,)}
    assert not plan.teacher.offload and not any(row.name == "teacher" for row in plan.memory.rows)  # nothing of it is on the ranks
    assert "org/t, bfloat16, a vLLM server of its own on GPUs 4, 5 of the first rank's machine, started by the run" in plan_text(plan)
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize(
    ("asked", "path", "message"),
    [
        ({"place": "gpus: 5"}, "models.teacher.placement.gpus", "asks for 5 GPUs; of the machine's 8: 4 train, 4 are free"),
        (
            {"place": "gpus: 3", "judge_gpus": 2},
            "models.scorers.j.placement.gpus",
            "asks for 2 GPUs; of the machine's 8: 4 train, the teacher has 3, 1 are free",
        ),
        (
            {"place": "gpus: 1", "max_positions": 2048},
            "models.teacher.placement",
            "a server of the teacher needs 2049 positions, one behind the longest prompt and completion; it has 2048",
        ),
    ],
)
def test_teachers_that_have_no_place(asked: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        taught(asked.pop("place"), **asked)
    assert {problem.path: problem.message for problem in caught.value.problems} == {path: message}
