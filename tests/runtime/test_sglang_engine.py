"""What an SGLang engine is started with, from the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.plan.plan import Plan
from rftcli.plan.plan_engine import SglangPlan
from rftcli.runtime.prepare import prepare
from rftcli.runtime.sglang_engine import CPU_SHARE, ON_CPU, SPARE_TOKENS, arguments, reads
from rftcli.runtime.world import SoloWorld

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return prepare(Path("quickstart"), (), ranks=1, gpus=None).plan


def asked(plan: Plan, device: torch.device = CPU, first_step: int = 1, rank: int = 0, **changes: Any) -> dict[str, Any]:
    engine = SglangPlan(**{
        "tensor_parallel": 1, "max_model_tokens": 100, "max_sequences": 16, "memory_share": None, "cache_bytes": 4096, "cache_tokens": 1700,
        "weight_bytes": 1 << 20, "sleep": 0, "graphs": False, "seeds": "auto", "check_weights": False, **changes,
    })  # fmt: skip
    world: Any = SoloWorld() if rank == 0 else SimpleNamespace(rank=rank, size=8)
    return arguments(plan, engine, world, device, first_step=first_step, reads_text=False)


def test_on_a_cpu(plan: Plan) -> None:
    found = asked(plan)
    assert (found["load_format"], found["dtype"], found["device"], found["base_gpu_id"], found["tp_size"]) == ("dummy", "float32", "cpu", 0, 1)
    assert (found["context_length"], found["max_total_tokens"], found["max_running_requests"]) == (100 + SPARE_TOKENS, 1700, 16)
    assert (found["mem_fraction_static"], found["disable_cuda_graph"], found["skip_tokenizer_init"]) == (CPU_SHARE, True, True)
    assert not found["enable_deterministic_inference"] and "enable_memory_saver" not in found and found.items() >= ON_CPU.items()
    assert asked(plan, cache_tokens=50)["max_total_tokens"] == 100 + SPARE_TOKENS  # one sequence has room


def test_what_sleep_seeds_and_graphs_ask_for(plan: Plan) -> None:
    assert asked(plan, sleep=1).items() >= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}.items()
    assert asked(plan, sleep=2).items() >= {"enable_memory_saver": True, "enable_weights_cpu_backup": False}.items()
    assert asked(plan, seeds="request")["enable_deterministic_inference"]
    assert asked(plan, graphs=True).items() >= {"disable_cuda_graph": False, "cuda_graph_max_bs": 16}.items()


def test_engines_of_a_run_and_its_attempts_have_other_noise(plan: Plan) -> None:
    def seed(**changes: Any) -> int:
        return asked(plan, **changes)["random_seed"]

    assert len({seed(), seed(rank=1), seed(first_step=2), seed(rank=1, first_step=2)}) == 4
    assert seed() == seed() and seed(rank=2, tensor_parallel=2) == seed(rank=3, tensor_parallel=2) != seed(rank=1, tensor_parallel=2)


def test_the_engine_reads_text_only_for_some_keys(plan: Plan) -> None:
    rollout = plan.rollout
    assert not reads(plan)
    for changed in ({"stop": ("a",)}, {"min_new_tokens": 2}, {"structured": {"regex": "a"}}):
        assert reads(replace(plan, rollout=replace(rollout, **changed)))
    one, sampling = next(iter(plan.eval.sampling.items()))
    assert reads(replace(plan, eval=replace(plan.eval, sampling={one: replace(sampling, min_new_tokens=1)})))
