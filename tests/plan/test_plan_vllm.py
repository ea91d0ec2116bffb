"""Which engine samples, how a device is divided between it and the training, and what a vLLM engine is refused with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.plan.compile_problems import CompileError
from rftcli.plan.engine_memory import CACHE_WORTH_HAVING, Engine, divide, engine
from rftcli.plan.facts import MachineFacts
from rftcli.plan.memory import GIB, USABLE_SHARE
from rftcli.plan.plan import Plan
from rftcli.plan.show import plan_text
from rftcli.runtime.early_checks import imitated

Compiled = Callable[..., Plan]
SMALL = {"parameters": 500_000_000, "layers": 24, "hidden": 896, "vocabulary": 151936, "key_width": 128, "max_positions": 32768}
SEVEN = {"parameters": 7_600_000_000, "layers": 28, "hidden": 3584, "vocabulary": 152064, "key_width": 512, "max_positions": 32768}


@pytest.fixture
def with_vllm(gpus: MachineFacts) -> MachineFacts:
    return replace(gpus, vllm=True)


def refused(compiled: Compiled, *sets: str, **arguments: object) -> dict[str, str]:
    with pytest.raises(CompileError) as caught:
        compiled(*sets, **arguments)
    return {problem.path: f"{problem.message}; {problem.hint}" for problem in caught.value.problems}


def test_auto_says_which_engine_and_why(compiled: Compiled, gpus: MachineFacts, with_vllm: MachineFacts) -> None:
    def chosen(machine: MachineFacts | None, *sets: str) -> tuple[str, str]:
        plan = compiled(*sets, **({} if machine is None else {"machine": machine}), **SMALL)
        return plan.rollout.engine, next(note for note in plan.notes if note.startswith("rollout.engine"))

    assert chosen(with_vllm) == ("vllm", "rollout.engine vllm: there is a GPU, and the package (of another machine it is taken to be there)")
    assert chosen(gpus) == ("hf", "rollout.engine hf: vllm is not installed (pip install 'rftcli[vllm]')")
    assert chosen(None) == ("hf", "rollout.engine hf: no GPU is used")
    assert chosen(with_vllm, "rollout.hf.options.typical_p=0.9")[0] == "hf"


OLD = (
    "Tesla V100-SXM2-16GB", "V100S-PCIE-32GB", "T4", "NVIDIA T1000", "NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce GTX 1660", "Quadro GV100",
    "NVIDIA TITAN RTX", "Tesla P40",
)  # fmt: skip
NEW = (
    "NVIDIA A100-SXM4-80GB", "NVIDIA RTX 2000 Ada Generation", "NVIDIA RTX A4000", "NVIDIA GeForce RTX 3090", "NVIDIA L4", "NVIDIA H200",
    "NVIDIA A10G", "NVIDIA L40S", "AMD Instinct MI300X", "NVIDIA GeForce RTX 4060", "NVIDIA GB200",
)  # fmt: skip


@pytest.mark.parametrize("name", [*OLD, *NEW])
def test_a_card_without_bfloat16(compiled: Compiled, gpus: MachineFacts, name: str) -> None:
    """A float32 policy is what it trains and serves; vLLM would end with an error after loading."""
    machine, old = replace(gpus, vllm=True, gpu_name=name), name in OLD
    plan = compiled(machine=machine, **SMALL)
    assert (plan.policy.dtype, plan.rollout.engine) == ("float32" if old else "bfloat16", "vllm")
    assert (f"models.policy.dtype float32: {name} does not compute in bfloat16" in plan.notes) is old
    asked = ("models.policy.dtype=bfloat16", "rollout.engine=vllm")
    if old:
        problem = refused(compiled, *asked, machine=machine, **SMALL)["rollout.engine"]
        assert f"vllm does not run a model in bfloat16 on {name}" in problem and "`models.policy.dtype: float32`" in problem
        slow = compiled("models.policy.dtype=bfloat16", machine=machine, **SMALL)
        assert slow.rollout.engine == "hf"
        (told,) = imitated(slow, machine)
        assert f"{name} only imitates bfloat16" in told and imitated(plan, machine) == ()
        started = (*asked, "rollout.vllm.server={start: {gpus: [1]}}")
        assert "in bfloat16" in refused(compiled, *started, machine=machine, **SMALL)["rollout.engine"]
    else:
        assert imitated(plan, machine) == ()
        assert compiled(*asked, machine=machine, **SMALL).rollout.engine == "vllm"


def test_settings_of_another_engine_are_told_to_have_no_effect(compiled: Compiled) -> None:
    assert "rollout.vllm has no effect: the engine is hf" in compiled("rollout.vllm.max_sequences=8").notes
    assert "rollout.hf has no effect: the engine is vllm" in compiled("rollout={engine: vllm, hf: {batch_rows: 8}}").notes


def test_an_engine_gets_its_share_of_a_step_and_the_lengths_of_rollout_and_evaluation(compiled: Compiled, with_vllm: MachineFacts) -> None:
    sets = ("rollout.engine=vllm", "batch.prompts_per_step=24", "rollout.samples_per_prompt=5", "rollout={max_prompt_tokens: 10, max_new_tokens: 20}")
    found = compiled(*sets, ranks=4).rollout.vllm
    assert found is not None and (found.max_sequences, found.max_model_tokens) == (32, 30)  # 24 / 4 x 5 = 30 rows, up to a multiple of 8
    several = compiled(*sets, "batch.rollouts_per_update=3", ranks=4).rollout.vllm
    assert several is not None and several.max_sequences == 16
    spares = compiled(*sets, "rollout.over_sample={factor: 1.25, slice_tokens: 10}", ranks=4).rollout.vllm
    assert spares is not None and spares.max_sequences == 40  # 2 prompts more on every rank: (6 + 2) x 5
    twins = compiled(*sets, "algorithm.advantage.kind=remax", ranks=4).rollout.vllm
    assert twins is not None and twins.max_sequences == 40  # a greedy answer more to each prompt: 6 x 6, up to a multiple of 8
    longer = compiled(*sets, "data.eval.test={path: t.jsonl, sampling: {max_new_tokens: 99}}", ranks=4).rollout.vllm
    assert longer is not None and longer.max_model_tokens == 109
    two = compiled(*sets, "rollout.vllm.tensor_parallel=2", ranks=4, machine=with_vllm).rollout.vllm
    assert two is not None and (two.tensor_parallel, two.max_sequences) == (2, 64)


def test_everything_fits_so_the_engine_stays_awake(compiled: Compiled, with_vllm: MachineFacts) -> None:
    plan = compiled(machine=with_vllm, ranks=8, **SMALL)
    vllm = plan.rollout.vllm
    assert vllm is not None and vllm.sleep == 0 and vllm.graphs and not plan.rollout.shares_weights
    # 64 prompts x 8 / 8 ranks = 64 sequences of 2048 tokens; keys and values of 24 layers x 128 numbers of 2 bytes
    assert vllm.cache_bytes == 65 * 2048 * 2 * 24 * 128 * 2
    text = plan_text(plan)
    assert "vLLM inside the ranks, one in every rank" in text and "graphs up to 64 rows" in text and "all of it fits at once" in text


def test_where_it_does_not_fit_they_take_turns(compiled: Compiled, with_vllm: MachineFacts) -> None:
    # stage 3 keeps 16 GiB of 40, activations take 6: the engine's 14 GiB of weights and what it works in have room only in turn
    small = replace(with_vllm, gpu_memory_gib=40.0)
    plan = compiled(machine=small, ranks=8, **SEVEN)
    vllm = plan.rollout.vllm
    assert vllm is not None and vllm.sleep == 1 and any("rollout.vllm.sleep 1" in note and "they take turns" in note for note in plan.notes)
    little = compiled(machine=replace(small, memory_gib=128.0), ranks=8, **SEVEN)
    assert little.rollout.vllm is not None and little.rollout.vllm.sleep == 2  # eight copies of 14 GiB do not fit into CPU memory
    asked = compiled("rollout.vllm.sleep=2", machine=with_vllm, ranks=8, **SMALL).rollout.vllm
    assert asked is not None and asked.sleep == 2


def test_what_cannot_fit_is_refused_with_the_sum(compiled: Compiled, with_vllm: MachineFacts) -> None:
    found = refused(compiled, "rollout.engine=vllm", machine=with_vllm, ranks=1, **SEVEN)
    assert "the engine does not fit beside the training" in found["rollout.engine"] and "GiB of training state" in found["rollout.engine"]
    assert "rollout.vllm.memory_share" in refused(compiled, "rollout.vllm.memory_share=0.9", machine=with_vllm, ranks=8, **SEVEN)


def test_a_share_is_refused_for_its_own_reason_with_the_shares_that_are_taken(compiled: Compiled, with_vllm: MachineFacts) -> None:
    small = refused(compiled, "rollout.vllm.memory_share=0.01", machine=with_vllm, ranks=8, **SMALL)["rollout.vllm.memory_share"]
    assert small.startswith("that share has no room for one sequence: ") and "that does not fit" not in small
    large = refused(compiled, "rollout.vllm.memory_share=0.95", machine=with_vllm, ranks=8, **SMALL)["rollout.vllm.memory_share"]
    assert large.startswith("the engine does not fit beside the training: ")
    for told in (small, large):
        least, most = (float(word) for word in told.partition("; a share from ")[2].removesuffix(", or `auto`").split(" to "))
        for share in (least, most):
            assert compiled(f"rollout.vllm.memory_share={share}", machine=with_vllm, ranks=8, **SMALL)


def test_ways_out_are_those_that_are_open(compiled: Compiled, with_vllm: MachineFacts) -> None:
    def hint(*sets: str, ranks: int) -> str:
        with pytest.raises(CompileError) as caught:
            compiled(*sets, machine=with_vllm, ranks=ranks, **SEVEN)
        return " ".join(str(problem.hint) for problem in caught.value.problems)

    alone = hint("rollout.engine=vllm", ranks=1)
    assert "train.offload.optimizer: cpu" in alone and "models.policy.lora" in alone
    assert "sleep" not in alone and "ZeRO" not in alone and "tensor_parallel" not in alone
    share = hint("rollout.vllm.memory_share=0.9", "rollout.vllm.sleep=0", ranks=8)
    assert share == "a share from 0.21 to 0.65, or `auto`"
    awake = hint("rollout.engine=vllm", "rollout.vllm.sleep=0", ranks=1)
    assert awake.startswith("`rollout.vllm.sleep: 1`, more ranks, `train.offload.optimizer: cpu`")


def test_auto_takes_the_other_engine_where_vllm_does_not_fit(compiled: Compiled, with_vllm: MachineFacts) -> None:
    plan = compiled(machine=with_vllm, ranks=1, **SEVEN)
    assert plan.rollout.engine == "hf" and plan.rollout.vllm is None
    assert any(note.startswith("rollout.engine hf: vllm is there, but the engine does not fit") for note in plan.notes)


def test_a_share_that_is_written_counts(compiled: Compiled, with_vllm: MachineFacts) -> None:
    vllm = compiled("rollout.vllm.memory_share=0.5", machine=with_vllm, ranks=8, **SMALL).rollout.vllm
    assert vllm is not None and vllm.memory_share == 0.5 and vllm.cache_bytes is not None
    assert 0.4 * 80 * GIB < vllm.cache_bytes < 0.5 * 80 * GIB
    unknown = compiled(machine=with_vllm, ranks=8).rollout.vllm
    assert unknown is not None and (unknown.cache_bytes, unknown.memory_share, unknown.sleep) == (None, 0.4, 1)


@pytest.mark.parametrize(
    ("sets", "path", "text"),
    [
        ("rollout.vllm.max_model_tokens=2047", "rollout.vllm.max_model_tokens", "fewer than the 2048 of the longest prompt and completion"),
        ("rollout.vllm.max_model_tokens=40000", "rollout.vllm.max_model_tokens", "the model has 32768 positions"),
        ("rollout.vllm.tensor_parallel=2", "rollout.vllm.tensor_parallel", "must be 1 on a CPU"),
        ("rollout.vllm.sleep=1", "rollout.vllm.sleep", "vllm does not sleep on a CPU"),
    ],
)
def test_refusals(compiled: Compiled, sets: str, path: str, text: str) -> None:
    assert text in refused(compiled, "rollout.engine=vllm", sets, ranks=4, **SMALL)[path]


def test_ranks_that_share_an_engine_divide_those_of_a_machine(compiled: Compiled, with_vllm: MachineFacts) -> None:
    found = refused(compiled, "rollout.vllm.tensor_parallel=3", ranks=4, machine=with_vllm, **SMALL)["rollout.vllm.tensor_parallel"]
    assert "do not divide the 4 ranks of a machine; one of 1, 2, 4" in found


def test_sglang_is_planned_alike(compiled: Compiled, gpus: MachineFacts, with_vllm: MachineFacts) -> None:
    plan = compiled("rollout.engine=sglang", machine=gpus, ranks=8, **SMALL)
    found, vllm = plan.rollout.sglang, compiled("rollout.vllm.process=beside", machine=with_vllm, ranks=8, **SMALL).rollout.vllm
    assert found is not None and vllm is not None
    assert plan.rollout.own_engine is found and plan.rollout.vllm is None and not plan.rollout.shares_weights
    for name in ("max_model_tokens", "max_sequences", "cache_bytes", "memory_share", "sleep", "graphs", "memory"):
        assert getattr(found, name) == getattr(vllm, name)
    assert found.cache_tokens == 65 * 2048 and found.weight_bytes == 2 * 500_000_000
    parts = {row.name: row.gib for row in plan.memory.rows} if plan.memory is not None else {}
    assert parts["engine weights"]["rollout"] == pytest.approx(found.weight_bytes / 2**30) and parts["KV cache"]["learn"] > 0
    text = plan_text(plan)
    assert "SGLang beside the ranks, one in every rank" in text and "graphs up to 64 rows" in text
    assert any(note.startswith("sglang: the engine's generator is seeded when it starts") for note in plan.notes)
    turns = compiled("rollout.engine=sglang", machine=replace(gpus, gpu_memory_gib=40.0), ranks=8, **SEVEN)
    assert turns.rollout.sglang is not None and turns.rollout.sglang.sleep == 1
    assert "rollout.sglang has no effect: the engine is hf" in compiled("rollout.sglang.max_sequences=8").notes
    assert "rollout.vllm has no effect: the engine is sglang" in compiled("rollout={engine: sglang, vllm: {max_sequences: 8}}").notes


@pytest.mark.parametrize(
    ("sets", "path", "text"),
    [
        ("rollout.sglang.max_model_tokens=2047", "rollout.sglang.max_model_tokens", "fewer than the 2048 of the longest prompt and completion"),
        ("rollout.sglang.tensor_parallel=2", "rollout.sglang.tensor_parallel", "must be 1 on a CPU"),
        ("rollout.sglang.sleep=1", "rollout.sglang.sleep", "sglang does not sleep on a CPU"),
        ("rollout.sglang.seeds=request", "rollout.sglang.seeds", "must be `engine` or `auto` on a CPU"),
    ],
)
def test_refusals_of_sglang(compiled: Compiled, sets: str, path: str, text: str) -> None:
    assert text in refused(compiled, "rollout.engine=sglang", sets, ranks=4, **SMALL)[path]


def test_an_adapter_by_itself_is_shown(compiled: Compiled) -> None:
    plan = compiled("rollout={engine: vllm, vllm: {lora: adapter}}", "models.policy.lora={rank: 8}", **SMALL)
    assert plan.rollout.vllm is not None and plan.rollout.vllm.lora == "adapter"
    assert "the base once, the adapter after every update" in plan_text(plan)
    merged = compiled("rollout.engine=vllm", "models.policy.lora={rank: 8}", **SMALL)
    assert "in place after every update, adapter merged" in plan_text(merged)


def test_probes_of_the_engine_are_those_of_any_real_one(compiled: Compiled) -> None:
    assert compiled("rollout.engine=vllm").probes(1) and not compiled("rollout={engine: vllm, top_p: 0.9}").probes(1)


WANTED = engine(
    parameters=1000, number_bytes=2, layers=3, key_width=5, vocabulary=7, tensor_parallel=2, sequences=4, tokens=130
)


def test_an_engine_in_numbers() -> None:
    assert WANTED.weights == 1000
    assert WANTED.cache_per_token == 2 * 3 * 5 * 2 / 2 and WANTED.tokens == 256
    assert WANTED.cache_wanted == (4 + 1) * 256 * 30 and WANTED.cache_least == 256 * 30


@given(st.integers(1, 200), st.integers(0, 100), st.integers(0, 100), st.integers(1, 50), st.integers(1, 5), st.integers(1, 64))
def test_a_division_never_hands_out_more_than_there_is(device: int, training: int, working: int, weights: int, least: int, sequences: int) -> None:
    wanted = Engine(weights=weights * GIB, working=GIB, cache_per_token=least * GIB / 4, sequences=sequences, tokens=4)
    found = divide(device * GIB, training * GIB, working * GIB, wanted)
    assert not found.too_small  # nobody asked for a share
    if found.fits:
        used = training * GIB + wanted.weights + wanted.working + found.cache + (0 if found.sleeps else working * GIB)
        assert used <= USABLE_SHARE["cuda"] * device * GIB * (1 + 1e-9)
        assert wanted.cache_least <= found.cache <= wanted.cache_wanted
        assert found.sleeps or found.cache >= min(wanted.cache_wanted, CACHE_WORTH_HAVING * wanted.cache_wanted)
    together = USABLE_SHARE["cuda"] * device * GIB - (training + working) * GIB - wanted.weights - wanted.working
    if together >= wanted.cache_wanted:
        assert found.fits and not found.sleeps and found.cache == wanted.cache_wanted
