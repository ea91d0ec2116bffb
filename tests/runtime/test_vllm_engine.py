"""What a vLLM engine inside a rank is started with, from the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.plan.plan import Plan
from rftcli.plan.plan_engine import VllmPlan
from rftcli.plan.plan_models import LoraPlan
from rftcli.runtime.prepare import prepare
from rftcli.runtime.vllm_engine import arguments, reads
from rftcli.runtime.world import SoloWorld

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return prepare(Path("quickstart"), (), ranks=1, gpus=None).plan


def asked(plan: Plan, rank: int = 0, reads_text: bool = False, **changes: Any) -> dict[str, Any]:
    engine = VllmPlan(**{
        "tensor_parallel": 1, "max_model_tokens": 100, "max_sequences": 24, "memory_share": None, "cache_bytes": 4096, "sleep": 0, "graphs": False,
        "seeds": "auto", "check_weights": False, **changes,
    })  # fmt: skip
    world: Any = SoloWorld() if rank == 0 else SimpleNamespace(rank=rank, size=8)
    return arguments(plan, engine, world, CPU, reads_text=reads_text)


def test_what_every_engine_gets(plan: Plan) -> None:
    found = asked(plan)
    assert (found["load_format"], found["dtype"], found["distributed_executor_backend"]) == ("dummy", "float32", "external_launcher")
    assert (found["max_model_len"], found["max_num_seqs"], found["kv_cache_memory_bytes"]) == (100, 24, 4096)
    assert (found["enable_prefix_caching"], found["logprobs_mode"], found["generation_config"]) == (True, "processed_logprobs", "vllm")
    assert (found["skip_tokenizer_init"], asked(plan, reads_text=True)["skip_tokenizer_init"]) == (True, False)
    assert "enable_sleep_mode" not in found and "enable_lora" not in found and "kv_cache_memory_bytes" not in asked(plan, cache_bytes=None)


def test_graphs_go_as_far_as_the_engine_has_rows(plan: Plan) -> None:
    eager = asked(plan)
    assert eager["enforce_eager"] and "graphs_up_to" not in eager
    for rows in (24, 1000):
        assert asked(plan, graphs=True, max_sequences=rows).items() >= {"enforce_eager": False, "graphs_up_to": rows}.items()


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_is_started_so(plan: Plan, level: int) -> None:
    assert asked(plan, sleep=level)["enable_sleep_mode"] is True


def test_room_for_an_adapter_where_it_travels_by_itself(plan: Plan) -> None:
    lora = LoraPlan(rank=12, alpha=24.0, dropout=0.0, targets=("all-linear",), pattern=False, save_also=(), start_from=None, options={})
    adapted = replace(plan, policy=replace(plan.policy, lora=lora))
    assert asked(adapted, lora="adapter").items() >= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16}.items()
    assert "enable_lora" not in asked(adapted) and "enable_lora" not in asked(plan, lora="adapter")


def test_ranks_of_one_engine_have_one_seed_and_others_another(plan: Plan) -> None:
    assert asked(plan)["seed"] != asked(plan, rank=1)["seed"]
    assert asked(plan, rank=2, tensor_parallel=2)["seed"] == asked(plan, rank=3, tensor_parallel=2)["seed"]
    assert asked(replace(plan, seed=plan.seed + 1))["seed"] != asked(plan)["seed"]


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        ((), False),
        (("rollout.stop=['####']",), True),
        (("rollout.by_label={default: {stop: ['####']}}",), True),
        (("rollout.by_label={default: {temperature: 0.5}}",), False),
        (("rollout.bad_words=['Q']",), True),
        (("rollout.structured={regex: 'a+'}",), True),
    ],
)
def test_text_is_read_where_any_call_needs_it(sets: tuple[str, ...], text: bool) -> None:
    """A label's own stop strings too: the engine is started once for all of them."""
    assert reads(prepare(Path("quickstart"), sets, ranks=1, gpus=None).plan) is text
