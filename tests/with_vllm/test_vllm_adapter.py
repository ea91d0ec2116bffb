"""The real engine serves an adapter beside its base: the base is pushed once, the adapter by itself, and log-probs are those of the merged model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import engine_contract
import pytest
import torch
import torch.distributed as dist

from rftcli.builtin import builtin_path
from rftcli.engines.vllm import VLLMSampler, start
from rftcli.engines.vllm_adapter import held_by, room_for
from rftcli.engines.vllm_decode import quicken
from rftcli.models.load import load_causal_lm, load_tokenizer
from rftcli.models.lora import AdaptedWeights, attach
from rftcli.runtime.engine_folder import config_folder
from rftcli.runtime.vllm_engine import ALWAYS, UNLESS_SET
from rftcli.runtime.world import SoloWorld

QUESTION = (1, 51, 28, 223, 24, 21, 15, 18, 19, 222, 35, 28)


class Counted(AdaptedWeights):
    """Tells how often the base was asked for."""

    bases = 0

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        Counted.bases += 1
        return super().base()


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    os.environ.update(ALWAYS | UNLESS_SET | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    path = str(builtin_path("quickstart"))
    model = load_causal_lm(path, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()
    tokenizer = load_tokenizer(path)
    folder = str(config_folder(model, tokenizer, "float32"))
    adapter = attach(model, rank=4, alpha=6.0, dropout=0.0, targets="all-linear", save_also=(), options={}, start_from=None, base_name=path)
    if not dist.is_initialized():  # another file of tests may have had an engine in this process
        dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('meet') / 'file'}", rank=0, world_size=1)
    arguments = {
        "load_format": "dummy", "dtype": "float32", "distributed_executor_backend": "external_launcher", "enforce_eager": True,
        "kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 128, "max_num_seqs": 64, "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm", "enable_prefix_caching": True, "enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(4),
    }  # fmt: skip
    llm, params, fields, _ = start(folder, arguments, {})
    sampler = VLLMSampler(
        llm, params, fields, model, tokenizer, (2,), world=SoloWorld(), seeded=True, check=True, adapters=True, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    contract = engine_contract.Kit(model=model, tokenizer=tokenizer, sampler=sampler, question=QUESTION, end=2, word="####")
    yield SimpleNamespace(contract=contract, sampler=sampler, llm=llm, model=model, adapter=adapter)
    sampler.close()


def move(kit: SimpleNamespace, seed: int, size: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in kit.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, size, generator=generator)


def push(kit: SimpleNamespace, version: int) -> None:
    kit.sampler.load(Counted(kit.adapter, lambda parameters: nullcontext()), version)


def agrees(kit: SimpleNamespace, version: int) -> list[Any]:
    found = kit.contract.sample(8, logprobs=True)
    for made in found:
        assert made.policy_version == version
        assert torch.allclose(torch.tensor(made.trace.logprobs), kit.contract.logprobs(made.trace.ids), atol=1e-4)
    return [made.trace.ids for made in found]


def test_the_base_is_pushed_once_and_the_adapter_every_time(kit: SimpleNamespace) -> None:
    push(kit, 1)
    plain = agrees(kit, 1)  # B is 0
    move(kit, 1)
    push(kit, 2)
    moved = agrees(kit, 2)
    move(kit, 2)
    push(kit, 3)
    assert agrees(kit, 3) != moved != plain and Counted.bases == 1
    assert kit.llm.llm_engine.list_loras() == {3}


def test_a_stale_adapter_is_found(kit: SimpleNamespace) -> None:
    move(kit, 3)
    push(kit, 4)
    engine = kit.llm.apply_model(lambda model: model)[0]
    whole = held_by(engine).total
    touched = next(module for module in engine.modules() if "lora_b_stacked" in vars(module))
    touched.lora_b_stacked[0].view(-1)[0] += 1.0
    assert held_by(engine).total != whole
    push(kit, 5)  # compared against what was sent: it has replaced everything
    agrees(kit, 5)


def test_merged_weights_are_taken_as_well(kit: SimpleNamespace) -> None:
    """An evaluation of a checkpoint has no adapter any more."""
    kit.sampler.load(((name, tensor.clone()) for name, tensor in kit.adapter.merged(lambda parameters: nullcontext())), 6)
    before = agrees(kit, 6)
    push(kit, 7)
    assert Counted.bases == 2 and len(agrees(kit, 7)) == len(before)


def test_several_steps_for_a_turn_of_the_scheduler_sample_the_same_with_an_adapter(kit: SimpleNamespace) -> None:
    move(kit, 8)
    push(kit, 8)
    burst = quicken(kit.llm)
    assert burst is not None
    before = burst.steps
    asked: dict[str, Any] = {"samples": 24, "ignore_eos": True, "max_new_tokens": 70, "logprobs": True}
    quick = [(made.trace.ids, made.trace.logprobs) for made in kit.contract.sample(**asked)]
    steps = burst.steps - before
    burst.undo()
    try:
        assert quick == [(made.trace.ids, made.trace.logprobs) for made in kit.contract.sample(**asked)]
    finally:
        burst.use()
    assert steps > 50
