"""What a recipe leaves to memory: the first rung that fits, monotone in the memory there is; and the plan's table, which is the sum of its parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rftcli.codec import from_data, to_data
from rftcli.plan.facts import MachineFacts
from rftcli.plan.memory_ladder import BESIDE_LESS, MOST_TOKENS, Choice, Free, choose, ladder
from rftcli.plan.plan import Plan
from rftcli.plan.plan_memory import STAGES, MemoryPlan
from rftcli.plan.show import plan_text

Compiled = Callable[..., Plan]
SEVEN = {
    "parameters": 7_600_000_000, "layers": 28, "hidden": 3584, "vocabulary": 152064, "key_width": 512, "query_width": 3584, "inner": 18944,
    "heads": 28, "max_positions": 32768,
}  # fmt: skip
HALF = {
    "parameters": 494_000_000, "layers": 24, "hidden": 896, "vocabulary": 151936, "key_width": 128, "query_width": 896, "inner": 4864, "heads": 14,
    "max_positions": 32768,
}  # fmt: skip
FREE = Free(stages=(1, 2, 3), tokens=(16384, 8192, 4096, 2048), checkpointing=(False, True), waits=(False, True))


def saves_more(lower: Choice, higher: Choice) -> bool:
    """Is every setting of the later rung at least as sparing?"""
    return (
        lower.zero_stage <= higher.zero_stage
        and lower.tokens >= higher.tokens
        and lower.checkpointing <= higher.checkpointing
        and lower.waits <= higher.waits
    )


def test_the_rungs_in_order() -> None:
    rungs = [(one.zero_stage, one.tokens, one.checkpointing, one.waits) for one in ladder(FREE)]
    assert rungs == [
        (1, 16384, False, False), (1, 8192, False, False), (2, 8192, False, False), (2, 8192, False, True), (2, 4096, False, True),
        (2, 4096, True, True), (2, 2048, True, True), (3, 2048, True, True),
    ]  # fmt: skip
    assert ladder(Free(stages=(3,), tokens=(77,), checkpointing=(True,), waits=(False,))) == [
        Choice(zero_stage=3, tokens=77, checkpointing=True, waits=False)
    ]


@given(
    st.sets(st.integers(0, 3), min_size=1), st.sets(st.integers(1, 20000), min_size=1), st.lists(st.floats(0, 100), min_size=40, max_size=40),
    st.floats(0, 100), st.floats(0, 100),
)  # fmt: skip
def test_more_memory_never_asks_for_more_thrift(stages: set[int], tokens: set[int], needs: list[float], little: float, more: float) -> None:
    """Whatever the rungs need, in any order."""
    free = Free(stages=sorted(stages), tokens=sorted(tokens, reverse=True), checkpointing=(False, True), waits=(False, True))
    rungs = ladder(free)
    assert all(saves_more(before, after) and before != after for before, after in pairwise(rungs))
    need = {rung: needs[index % 40] for index, rung in enumerate(rungs)}
    small, large = sorted((little, little + more))
    poor, rich = choose(rungs, need.__getitem__, small), choose(rungs, need.__getitem__, large)
    assert saves_more(rich.choice, poor.choice)
    for found, room in ((poor, small), (rich, large)):
        assert found.fits is (need[found.choice] <= room)
        if not found.fits:
            assert need[found.choice] == min(need.values())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(8, 200), st.integers(0, 200), st.sampled_from([1, 2, 8]), st.sampled_from([HALF, SEVEN]), st.booleans(), st.booleans())
def test_plans_for_larger_gpus(
    compiled: Compiled, gpus: MachineFacts, little: int, more: int, ranks: int, model: dict[str, int], kl: bool, vllm: bool
) -> None:
    sets = ("algorithm.kl.coefficient=0.1",) if kl else ()

    def plan(gib: int) -> Plan:
        # the engine `fake` holds nothing, and is never refused
        machine = replace(gpus, gpu_memory_gib=float(gib), vllm=vllm)
        return compiled(*sets, "rollout.engine=fake", machine=machine, ranks=ranks, **model)

    small, large = plan(little), plan(little + more)
    assert large.learner.zero_stage <= small.learner.zero_stage
    assert (large.batch.tokens_per_micro_batch or 0) >= (small.batch.tokens_per_micro_batch or 0)
    assert large.policy.gradient_checkpointing <= small.policy.gradient_checkpointing
    for one in (small, large):
        table = one.memory
        assert isinstance(table, MemoryPlan)
        for stage in STAGES:
            assert table.total_gib(stage) == pytest.approx(sum(row.gib.get(stage, 0.0) for row in table.rows))
        assert table.fits or any("expect to run out of it" in note for note in one.notes)
        assert table.peak[1] == max(map(table.total_gib, STAGES))
        assert from_data(Plan, to_data(one)) == one


def test_a_plan_that_fits_stays_as_fast_as_it_can_be(compiled: Compiled, gpus: MachineFacts) -> None:
    plan = compiled(machine=gpus, ranks=8, **HALF)
    assert (plan.learner.zero_stage, plan.batch.tokens_per_micro_batch, plan.policy.gradient_checkpointing) == (1, MOST_TOKENS["cuda"], False)
    large = compiled(machine=gpus, ranks=8, **SEVEN)
    assert large.learner.zero_stage == 2 and large.batch.tokens_per_micro_batch == 4096 and not large.policy.gradient_checkpointing
    assert large.memory is not None and large.memory.fits
    note = next(note for note in large.notes if note.startswith("ZeRO stage 2"))
    assert "ZeRO 1, 32768 tokens a micro-batch: " in note and "too much; " in note and note.endswith("fits")
    awake = compiled("rollout.engine=vllm", machine=replace(gpus, gpu_memory_gib=140.0), ranks=8, **SEVEN)
    told = re.search(r"at least ([\d.]+) GiB of [\d.]+ GiB, fits", " ".join(awake.notes))  # the engine takes more where it is awake
    assert told is not None and awake.memory is not None and float(told[1]) < awake.memory.peak[1]


@pytest.mark.parametrize("gib", range(40, 150, 10))
def test_the_largest_passes_take_nothing_from_the_engine(compiled: Compiled, gpus: MachineFacts, gib: int) -> None:
    sets = ("rollout.engine=vllm", "rollout.max_new_tokens=1024", "batch.prompts_per_step=256")
    plan = compiled(*sets, machine=replace(gpus, gpu_memory_gib=float(gib), vllm=True), ranks=1, train_rows=1000, **HALF)
    tokens, engine = plan.batch.tokens_per_micro_batch, plan.rollout.vllm
    assert tokens is not None and engine is not None and engine.cache_tokens is not None
    wanted = (engine.max_sequences + 1) * engine.max_model_tokens
    if tokens > BESIDE_LESS:
        assert engine.sleep == 0 and engine.cache_tokens >= wanted
    assert (tokens > BESIDE_LESS) is (gib >= 90)
    fixed = compiled(*sets, "batch.tokens_per_micro_batch=20000", machine=replace(gpus, gpu_memory_gib=float(gib), vllm=True), ranks=1, **HALF)
    assert not any("expect to run out" in note for note in fixed.notes)


def test_what_the_recipe_says_stays(compiled: Compiled, gpus: MachineFacts) -> None:
    small = replace(gpus, gpu_memory_gib=40.0)
    fixed = ("batch.tokens_per_micro_batch=8192", "train.deepspeed.zero_stage=1", "models.policy.gradient_checkpointing=false")
    plan = compiled(*fixed, machine=small, ranks=8, **SEVEN)
    assert (plan.learner.zero_stage, plan.batch.tokens_per_micro_batch, plan.policy.gradient_checkpointing) == (1, 8192, False)
    note = next(note for note in plan.notes if "expect to run out of it in learn" in note)
    assert "The biggest parts are activations" in note and "raise train.deepspeed.zero_stage" in note
    rows = compiled("batch.micro_batch_size=3", machine=small, ranks=8, **SEVEN)
    assert rows.batch.micro_batch_size == 3 and rows.batch.tokens_per_micro_batch is None


def test_a_reference_goes_to_the_cpu_before_layers_are_computed_again(compiled: Compiled, gpus: MachineFacts) -> None:
    def held(gib: float) -> tuple[bool, bool]:
        plan = compiled("algorithm.kl.coefficient=0.1", machine=replace(gpus, gpu_memory_gib=gib), ranks=8, **SEVEN)
        assert plan.reference_use is not None and plan.memory is not None
        row = next(row for row in plan.memory.rows if row.name == "reference")
        assert ("learn" in row.gib) is not plan.reference_use.offload
        assert any("the reference waits in CPU memory" in note for note in plan.notes) is plan.reference_use.offload
        return plan.reference_use.offload, plan.policy.gradient_checkpointing

    assert held(141.0) == (False, False)
    assert held(80.0) == (True, False)
    assert held(48.0) == (True, True)


def test_ranks_on_a_cpu_share_its_memory_and_rows_are_never_cut(compiled: Compiled) -> None:
    def tokens(gib: float, ranks: int, *sets: str) -> int | None:
        return compiled(*sets, machine=MachineFacts(cores=2, memory_gib=gib), ranks=ranks, **SMOLLM).batch.tokens_per_micro_batch

    short = "rollout={max_prompt_tokens: 100, max_new_tokens: 100}"
    found = [tokens(64.0, 1, short), tokens(8.0, 1, short), tokens(16.0, 2, short), tokens(9.0, 2, short)]
    assert found[0] == MOST_TOKENS["cpu"] and found[1] == found[2] and found[3] is not None and found[2] is not None and found[3] <= found[2] < 8192
    assert tokens(4.0, 1, "rollout.hf.batch_rows=8") == 2048  # one row of 2048 positions: less would cut nothing


SMOLLM = {
    "parameters": 134_500_000, "layers": 30, "hidden": 576, "vocabulary": 49152, "key_width": 192, "query_width": 576, "inner": 1536, "heads": 9,
    "max_positions": 8192,
}  # fmt: skip


def test_every_model_has_its_row(compiled: Compiled, gpus: MachineFacts) -> None:
    sets = ("algorithm={kl: {coefficient: 0.1}, advantage: {kind: gae}}", "models.critic={optimizer: {lr: 1e-5}}", "models.policy.ema={}")
    plan = compiled(*sets, machine=replace(gpus, vllm=True), ranks=8, **HALF)
    assert plan.memory is not None
    names = {row.name for row in plan.memory.rows}
    assert names >= {"weights", "optimizer", "gradients", "critic", "critic's gradients", "reference", "engine weights", "KV cache", "engine at work",
                     "activations", "logits"}  # fmt: skip
    on_cpu = compiled(*sets, **HALF)
    assert on_cpu.memory is not None and {"running mean", "process"} <= {row.name for row in on_cpu.memory.rows}
    adapted = compiled("models.policy.lora={rank: 8}", machine=gpus, ranks=1, **SEVEN).memory
    assert adapted is not None
    optimizer = next(row.gib["learn"] for row in adapted.rows if row.name == "optimizer")
    # 8 x 28 layers x (in + out of seven matrices), two float32 moments each
    assert optimizer == pytest.approx(8 * 8 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)) / 2**30)


def test_what_zero_3_keeps_between_updates_is_in_every_stage(compiled: Compiled, gpus: MachineFacts) -> None:
    def of(stage: int) -> dict[str, float]:
        plan = compiled(f"train.deepspeed.zero_stage={stage}", machine=gpus, ranks=8, **SEVEN)
        assert plan.memory is not None
        return next(row.gib for row in plan.memory.rows if row.name == "gradients")

    assert of(3) == pytest.approx(dict.fromkeys(STAGES, 4 * 7.6e9 / 8 / 2**30)) and set(of(2)) == {"learn"}


def test_what_adapters_keep(compiled: Compiled, gpus: MachineFacts) -> None:
    def activations(*sets: str) -> float:
        fixed = ("batch.tokens_per_micro_batch=4096", "models.policy.gradient_checkpointing=false", "models.policy.dtype=bfloat16")
        plan = compiled(*fixed, *sets, machine=gpus, ranks=1, **HALF)
        assert plan.memory is not None
        return next(row.gib["learn"] for row in plan.memory.rows if row.name == "activations")

    plain, dropped, dora = (activations(f"models.policy.lora={{rank: 8{more}}}") for more in ("", ", dropout: 0.1", ", options: {use_dora: true}"))
    assert activations() > plain and min(dropped, dora) > plain and dropped != dora


def test_the_table(compiled: Compiled, gpus: MachineFacts) -> None:
    text = plan_text(compiled(machine=gpus, ranks=8, **HALF))
    assert "memory of a GPU, GiB (device 80.00, usable 73.60)" in text
    lines = text.splitlines()
    header = next(line for line in lines if line.split() == list(STAGES))
    weights = next(line for line in lines if line.startswith("  weights"))
    assert weights.split()[1:] == ["0.92"] * 4 and len(weights) == len(header)
    assert any(line.startswith("peak ") and line.endswith("GiB left") for line in lines)
    assert compiled(machine=gpus, ranks=8, parameters=7).memory is None
