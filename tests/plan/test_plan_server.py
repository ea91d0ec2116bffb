"""Where engines in other processes are, what a plan says of them, and which GPUs a server may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rftcli.plan.compile_problems import CompileError
from rftcli.plan.facts import MachineFacts
from rftcli.plan.plan import Plan, plan_from_json, plan_to_json
from rftcli.plan.show import plan_text

Compiled = Callable[..., Plan]
SMALL = {"parameters": 500_000_000, "layers": 24, "hidden": 896, "vocabulary": 151936, "key_width": 128, "max_positions": 32768}
URLS = "rollout.vllm.server={urls: ['http://one:8000/v1/', 'http://two:8000']}"


def server(plan: Plan):
    assert plan.rollout.vllm is not None and plan.rollout.vllm.server is not None
    return plan.rollout.vllm.server


def refused(compiled: Compiled, *sets: str, **facts: object) -> dict[str, str]:
    with pytest.raises(CompileError) as caught:
        compiled(*sets, **facts)
    return {problem.path: f"{problem.message}; {problem.hint}" for problem in caught.value.problems}


def test_a_recipe_with_a_server_needs_no_vllm_here(compiled: Compiled) -> None:
    plan = compiled(URLS, ranks=4)
    assert plan.rollout.engine == "vllm" and "rollout.engine vllm: the recipe has a server" in plan.notes
    assert server(plan).urls == ("http://one:8000", "http://two:8000") and server(plan).count == 2
    assert plan.rollout.vllm is not None and (plan.rollout.vllm.process, plan.rollout.vllm.sleep) == ("server", 0)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_who_draws_with_seeds_is_seen_at_a_server_that_runs_already(compiled: Compiled) -> None:
    for where, said in ((URLS, "a seed of its own where"), ("rollout.vllm.server={start: {servers: 1}}", "a seed of its own;")):
        assert any(note.startswith("vllm: every completion has") and said in note for note in compiled(where).notes)


def test_a_server_takes_nothing_of_the_ranks_devices(compiled: Compiled, gpus: MachineFacts) -> None:
    names = [
        {row.name for row in compiled(f"rollout={{engine: vllm, vllm: {{{place}}}}}", machine=replace(gpus, vllm=True), **SMALL).memory.rows}
        for place in ("process: beside", "server: {urls: ['http://one:8000']}")
    ]
    assert "KV cache" in names[0] and names[0] - names[1] == {"KV cache", "engine weights", "engine at work"}


def test_servers_share_a_step_and_the_ranks_do_not(compiled: Compiled) -> None:
    sets = ("batch.prompts_per_step=24", "rollout.samples_per_prompt=5")
    shares = [compiled(*sets, URLS, ranks=ranks).rollout.vllm.max_sequences for ranks in (1, 4)]
    assert shares == [64, 64]  # 24 / 2 x 5 = 60 rows, up to a multiple of 8


def test_training_memory_is_not_divided_with_a_server(compiled: Compiled, gpus: MachineFacts) -> None:
    seven = {"parameters": 7_600_000_000, "layers": 28, "hidden": 3584, "vocabulary": 152064, "key_width": 512, "max_positions": 32768}
    four = replace(gpus, gpus=4)
    start = "rollout.vllm={tensor_parallel: 2, server: {start: {gpus: [2, 3]}}}"
    plan = compiled(start, "models.policy.dtype=bfloat16", machine=four, ranks=2, **seven)
    vllm = plan.rollout.vllm
    assert vllm is not None and (vllm.memory_share, vllm.cache_bytes, vllm.memory) == (0.9, None, "90% of GPUs of their own")
    assert compiled(start, "rollout.vllm.memory_share=0.5", machine=four, ranks=2, **seven).rollout.vllm.memory_share == 0.5


def test_gpus_of_a_server_are_no_ranks_and_exist(compiled: Compiled, gpus: MachineFacts) -> None:
    four = replace(gpus, gpus=4)
    path = "rollout.vllm.server.start.gpus"

    def told(numbers: str, **facts: object) -> str:
        return refused(compiled, f"rollout={{engine: vllm, vllm: {{server: {{start: {{gpus: {numbers}}}}}}}}}", **{**SMALL, **facts})[path]

    assert told("[1]", machine=four, ranks=2).startswith("GPU 1 is a training rank's: ranks have the first 2")
    assert told("[4]", machine=four, ranks=2).startswith("there is no GPU 4: this machine has 4")
    assert "such as [2], with `--gpus 2`" in told("[]", machine=four, ranks=2)
    assert told("[0]").startswith("the ranks train on the CPU")


def test_what_a_plan_says_of_engines_apart(compiled: Compiled, gpus: MachineFacts) -> None:
    text = plan_text(compiled(URLS))
    assert "vLLM at http://one:8000, http://two:8000" in text and "by broadcast where both sides have GPUs, else by files" in text
    started = plan_text(compiled("rollout={engine: vllm, vllm: {server: {start: {servers: 2}}}}"))
    assert "2 vLLM servers on the CPU of the first rank's machine, started by the run" in started and "GiB of cache a server" in started
    beside = compiled("rollout={engine: vllm, vllm: {process: beside}}", machine=replace(gpus, vllm=True), **SMALL)
    text = plan_text(beside)
    assert "vLLM in processes beside the ranks, one for every rank, on the same devices" in text and "by CUDA IPC" in text
    assert "through shared memory" in plan_text(compiled("rollout={engine: vllm, vllm: {process: beside}}"))


@pytest.mark.parametrize("on_gpu", [True, False])
def test_auto_is_inside_and_says_so(compiled: Compiled, gpus: MachineFacts, on_gpu: bool) -> None:
    plan = compiled("rollout.engine=vllm", **({"machine": replace(gpus, vllm=True)} if on_gpu else {}))
    assert plan.rollout.vllm is not None and plan.rollout.vllm.process == "inside"
    assert [note for note in plan.notes if note.startswith("rollout.vllm.process inside")]
    assert not any(note.startswith("rollout.vllm.process") for note in compiled("rollout={engine: vllm, vllm: {process: inside}}").notes)


def test_an_engine_beside_its_rank_pays_for_a_context_of_its_own(compiled: Compiled, gpus: MachineFacts) -> None:
    tight = {"parameters": 1_500_000_000, "layers": 28, "hidden": 1536, "vocabulary": 151936, "key_width": 256, "max_positions": 32768}
    small = replace(gpus, gpus=1, gpu_memory_gib=40.0, vllm=True)
    cache = [compiled(f"rollout={{engine: vllm, vllm: {{process: {where}, max_sequences: 1024}}}}", machine=small, **tight).rollout.vllm.cache_bytes
             for where in ("inside", "beside")]  # fmt: skip
    assert cache[0] - cache[1] == pytest.approx(0.75 * 2**30, rel=0.2)
