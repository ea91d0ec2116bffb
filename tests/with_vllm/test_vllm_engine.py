"""The real engine in this process, over the quickstart model: weights, log-probs, ends, penalties, forms."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import engine_contract
import pytest
import torch
import torch.distributed as dist
from engine_contract import Kit

from rftcli.builtin import builtin_path
from rftcli.engines.vllm import VLLMSampler, start
from rftcli.engines.vllm_decode import quicken
from rftcli.engines.vllm_weights import held_by
from rftcli.errors import RftError
from rftcli.models.load import load_causal_lm, load_tokenizer
from rftcli.runtime.engine_folder import config_folder
from rftcli.runtime.engine_process import ON_A_CPU
from rftcli.runtime.vllm_engine import ALWAYS, UNLESS_SET
from rftcli.runtime.world import SoloWorld
from rftcli.types import FinishReason, Prompt, Request, SamplingSettings

QUESTION = (1, 51, 28, 223, 24, 21, 15, 18, 19, 222, 35, 28)
END = 2


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    os.environ.update(ALWAYS | UNLESS_SET | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    path = str(builtin_path("quickstart"))
    model = load_causal_lm(path, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()
    tokenizer = load_tokenizer(path)
    if not dist.is_initialized():  # another file of tests may have had an engine in this process
        dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('meet') / 'file'}", rank=0, world_size=1)
    arguments = {
        "load_format": "dummy", "dtype": "float32", "distributed_executor_backend": "external_launcher", "enforce_eager": True,
        "kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 128, "max_num_seqs": 64, "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm", "enable_prefix_caching": True, "max_num_batched_tokens": 128,
        "block_size": 32, **ON_A_CPU,
    }  # fmt: skip
    llm, params, fields, free = start(str(config_folder(model, tokenizer, "float32")), arguments, {})
    assert free, "a CPU draws with a seed a row at no cost"
    sampler = VLLMSampler(
        llm, params, fields, model, tokenizer, (END,), world=SoloWorld(), seeded=True, check=True, dtype=torch.float32, device=torch.device("cpu")
    )
    found = Kit(model=model, tokenizer=tokenizer, sampler=sampler, question=QUESTION, end=END, word="####")
    yield SimpleNamespace(contract=found, sampler=sampler, llm=llm)
    sampler.close()  # vLLM ends the process group with the process


def test_it_refuses_to_sample_before_the_first_push(kit: SimpleNamespace) -> None:
    kit.sampler.version = None
    with pytest.raises(RftError, match="no weights yet"):
        kit.contract.sample()


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_the_contract(kit: SimpleNamespace, check: Callable[[Kit], None]) -> None:
    check(kit.contract)


def test_more_prompts_than_one_pass_holds_are_sampled_with_seeds(kit: SimpleNamespace) -> None:
    """A prompt that is cut between two passes would end vLLM's CPU build: its request has a seed."""
    prompts = [Prompt(draw=draw, row=0, row_id="t:0", source="t", label="l", text="", token_ids=(1, *range(10, 60), draw + 60)) for draw in range(40)]
    made = list(kit.sampler.generate([Request(prompt=one, samples=(0,)) for one in prompts], SamplingSettings(max_new_tokens=4, seed=0)))
    assert len(made) == 40 and all(one.trace.ids for one in made)


def test_new_weights_arrive_whole_and_change_the_samples(kit: SimpleNamespace) -> None:
    kit.sampler.load(kit.contract.weights(), 1)
    before = [made.trace.ids for made in kit.contract.sample()]
    assert before == [made.trace.ids for made in kit.contract.sample()]  # seeds of their own, the same company
    kit.sampler.load(kit.contract.weights(lambda name, tensor: tensor * 0.7), 2)  # `check`: compared bit for bit
    assert before != [made.trace.ids for made in kit.contract.sample()]
    kit.sampler.load(kit.contract.weights(), 3)
    assert before == [made.trace.ids for made in kit.contract.sample()]


PROMPTS = [(1, *range(10, 10 + length), 35, 28) for length in (3, 9, 30, 4, 17, 6, 25, 11, 5, 8, 14, 20)]
ROOM = 150
"""Blocks; 64 sequences of 120 tokens need 256."""
ASKED: dict[str, dict[str, Any]] = {
    "ends": {},
    "greedy": {"temperature": 0.0},
    "no ends": {"ignore_eos": True, "max_new_tokens": 90},  # beyond several turns
    "longer than the engine's limit": {"ignore_eos": True, "max_new_tokens": 127},
    "at least": {"min_new_tokens": 20},
    "stops": {"stop_token_ids": tuple(range(30, 60))},
    "words": {"stop": ("3", "9")},
    "log-probs": {"logprobs": True},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "top": {"top_k": 5, "top_p": 0.9, "logprobs": True},
}


def sampled(kit: SimpleNamespace, **settings: Any) -> dict[tuple[int, int], tuple[Any, ...]]:
    requests = [
        Request(prompt=Prompt(draw=draw, row=0, row_id="t:0", source="t", label="l", text="", token_ids=ids), samples=tuple(range(8)))
        for draw, ids in enumerate(PROMPTS)
    ]
    made = kit.sampler.generate(requests, SamplingSettings(**{"max_new_tokens": 40, "seed": 3} | settings))
    return {(one.prompt.draw, one.sample): (one.trace.ids, one.trace.logprobs, one.finish) for one in made}


@pytest.mark.parametrize("asked", ASKED)
def test_several_steps_for_a_turn_of_the_scheduler_sample_the_same(kit: SimpleNamespace, asked: str) -> None:
    """96 sequences where 64 fit: some wait, some end early, some at their limit."""
    burst = quicken(kit.llm)
    assert burst is not None
    kit.sampler.load(kit.contract.weights(), 1)
    before = burst.steps
    settings = ASKED[asked]
    quick = sampled(kit, **settings)
    steps = burst.steps - before
    burst.undo()
    try:
        assert quick == sampled(kit, **settings)
    finally:
        burst.use()
    assert len(quick) == 96 and steps > (80 if settings.get("ignore_eos") else 0)


def test_sequences_that_find_no_room_give_way_and_come_back(kit: SimpleNamespace) -> None:
    """Nearly all blocks of the cache are taken by somebody else: the scheduler preempts, and steps go on with the others."""
    burst = quicken(kit.llm)
    assert burst is not None
    kit.sampler.load(kit.contract.weights(), 1)
    settings = {"ignore_eos": True, "max_new_tokens": 90}
    roomy = sampled(kit, **settings)
    scheduler = kit.llm.llm_engine.engine_core.engine_core.scheduler
    preempted, own = [], scheduler._preempt_request
    scheduler._preempt_request = lambda request, *more, **options: (preempted.append(request.request_id), own(request, *more, **options))[1]
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - ROOM)
    before = burst.steps
    try:
        assert sampled(kit, **settings) == roomy
    finally:
        pool.free_blocks(held)
        scheduler._preempt_request = own
    assert preempted and burst.steps - before > 30


def test_a_stale_weight_is_found(kit: SimpleNamespace) -> None:
    """One number of one packed layer, by one unit in the last place; and the head's packed copy of a shared weight."""
    kit.sampler.load(kit.contract.weights(), 1)
    engine = kit.llm.apply_model(lambda model: model)[0]
    whole = held_by(engine).total

    def nudged(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.endswith("layers.1.mlp.down_proj.weight"):
            return tensor
        changed = tensor.clone()
        changed[3, 4] = torch.nextafter(changed[3, 4], torch.tensor(100.0))
        return changed

    kit.sampler.load(kit.contract.weights(nudged), 2)
    assert abs(held_by(engine).total - whole) == 1
    engine.lm_head.weight.data[0, 0] += 1.0
    with pytest.raises(RftError, match=r"packed copy of `lm_head.weight` is not its weight"):
        held_by(engine)
    kit.sampler.load(kit.contract.weights(), 3)


def test_what_only_some_engines_have(kit: SimpleNamespace) -> None:
    kit.sampler.load(kit.contract.weights(), 1)
    sample = kit.contract.sample
    assert any("####" in made.text for made in sample(16))
    assert all("####" not in made.text for made in sample(16, bad_words=("####",)))
    plain = [made.trace.ids for made in sample()]
    assert plain != [made.trace.ids for made in sample(repetition_penalty=2.0, presence_penalty=1.0)]
    formed = sample(structured={"regex": "[0-9]{3}"})
    assert all(len(made.text) == 3 and made.text.isdecimal() and made.finish is FinishReason.STOP for made in formed)
