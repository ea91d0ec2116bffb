"""The real engine in this process, over the quickstart model: weights, log-probs, ends, penalties, forms."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import engine_contract
import pytest
import torch
import torch.distributed as dist
from engine_contract import Kit

from rftcli.builtin import builtin_path
from rftcli.engines.vllm import VLLMSampler, start
from rftcli.engines.vllm_decode import Burst, quicken
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
ASKED: dict[str, dict[str, Any]] = {
    "ends": {},
    "greedy": {"temperature": 0.0},
    "no ends": {"ignore_eos": True, "max_new_tokens": 90},  # beyond several turns
    "longer than the engine's limit": {"ignore_eos": True, "max_new_tokens": 127},
    "at least": {"min_new_tokens": 20},
    "stops": {"stop_token_ids": tuple(range(30, 60))},
    "words": {"stop": ("3", "9"), "logprobs": True},
    "log-probs": {"logprobs": True},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "top": {"top_k": 5, "top_p": 0.9, "logprobs": True},
}


def asked_for(**more: Any) -> list[Request]:
    return [
        Request(prompt=Prompt(draw=draw, row=0, row_id="t:0", source="t", label="l", text="", token_ids=ids), samples=tuple(range(8)), **more)
        for draw, ids in enumerate(PROMPTS)
    ]


def sampled(kit: SimpleNamespace, requests: list[Request] | None = None, **settings: Any) -> dict[tuple[int, int], tuple[Any, ...]]:
    made = kit.sampler.generate(requests or asked_for(), SamplingSettings(**{"max_new_tokens": 40, "seed": 3} | settings))
    return {(one.prompt.draw, one.sample): (one.trace.ids, one.trace.logprobs, one.finish) for one in made}


@pytest.fixture
def burst(kit: SimpleNamespace) -> Burst:
    found = quicken(kit.llm)
    assert found is not None
    kit.sampler.load(kit.contract.weights(), 1)
    return found


def free_blocks(kit: SimpleNamespace) -> int:
    return int(core_of(kit).scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def core_of(kit: SimpleNamespace) -> Any:
    return kit.llm.llm_engine.engine_core.engine_core


def both_ways(burst: Burst, sample: Callable[[], Any]) -> tuple[Any, Any, int]:
    """With several steps for a turn, by vLLM alone, and how many steps were taken so."""
    before = burst.steps
    quick = sample()
    steps = burst.steps - before
    burst.undo()
    try:
        return quick, sample(), steps
    finally:
        burst.use()


@pytest.mark.parametrize("asked", ASKED)
def test_several_steps_for_a_turn_of_the_scheduler_sample_the_same(kit: SimpleNamespace, burst: Burst, asked: str) -> None:
    """96 sequences where 64 fit: some wait, some end early, some at their limit."""
    settings = ASKED[asked]
    quick, plain, steps = both_ways(burst, lambda: sampled(kit, **settings))
    assert quick == plain
    assert len(quick) == 96 and steps > (80 if settings.get("ignore_eos") else 0)


ROW_BY_ROW: list[dict[str, Any]] = [
    {}, {"logprobs": 5}, {"logprobs": 0, "max_tokens": 20}, {"stop": ["3", "9"], "logprobs": 2}, {"stop": ["9", "3"], "min_tokens": 9},
    {"structured_outputs": "[0-9]{12}"}, {"min_tokens": 30, "stop_token_ids": list(range(30, 90))}, {"bad_words": ["3", "=="]},
    {"logit_bias": {30: 4.0}}, {"max_tokens": 1, "logprobs": 1}, {"n": 3}, {"frequency_penalty": 1.0, "min_p": 0.1},
    {"allowed_token_ids": list(range(20, 90))}, {"temperature": 0.0, "logprobs": 3}, {"prompt_logprobs": 1, "max_tokens": 12},
]  # fmt: skip


@pytest.mark.parametrize("left_out", [(), ("structured_outputs", "prompt_logprobs")], ids=["all", "without those that vLLM does alone"])
def test_all_kinds_of_sequences_next_to_each_other(kit: SimpleNamespace, burst: Burst, left_out: tuple[str, ...]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def told(one: Any) -> tuple[Any, ...]:
        columns = None if one.logprobs is None else [{token: entry.logprob for token, entry in place.items()} for place in one.logprobs]
        return tuple(one.token_ids), one.text, one.finish_reason, one.stop_reason, columns

    def sample() -> list[Any]:
        prompts, params = [], []
        for number, row in enumerate(row for row in ROW_BY_ROW if not set(left_out) & set(row)):
            formed = {"structured_outputs": StructuredOutputsParams(regex=row["structured_outputs"])} if "structured_outputs" in row else {}
            for length in (4, 40, 126, 127):  # the longest has room for one token
                prompts.append({"prompt_token_ids": [1, *(10 + place % 190 for place in range(length - 1))]})
                params.append(SamplingParams(**{"max_tokens": 70, "seed": 10 * number + length, "ignore_eos": number % 2 == 0} | row | formed))
        return [[told(one) for one in output.outputs] for output in kit.llm.generate(prompts, params, use_tqdm=False)]

    quick, plain, steps = both_ways(burst, sample)
    assert quick == plain
    assert steps > 20


def test_answers_go_on(kit: SimpleNamespace, burst: Burst) -> None:
    """Cut at 17 tokens and gone on with, once more cut, and to the end."""

    def sample() -> Any:
        requests, found = asked_for(limit=17), []
        for limit in (50, None):
            cut = list(kit.sampler.generate(requests, SamplingSettings(max_new_tokens=90, seed=3, logprobs=True)))
            found.append({(one.prompt.draw, one.sample): (one.trace, one.finish) for one in cut})
            traces = {one.prompt.draw: {made.sample: made.trace for made in cut if made.prompt.draw == one.prompt.draw} for one in requests}
            requests = [replace(one, limit=limit, partial=traces[one.prompt.draw]) for one in requests]
        return found, sampled(kit, requests, max_new_tokens=90, logprobs=True)

    quick, plain, steps = both_ways(burst, sample)
    assert quick == plain
    assert steps > 0


def test_an_answer_is_found_again_by_a_prompt_that_goes_on_from_it(kit: SimpleNamespace, burst: Burst) -> None:
    """A conversation: the cache holds an answer to its last whole block, as much as by vLLM alone."""
    from vllm import SamplingParams

    def sample() -> Any:
        kit.llm.reset_prefix_cache()
        params = [SamplingParams(seed=length, max_tokens=length, ignore_eos=True) for length in range(50, 90)]
        prompts = [[1, *(10 + (place * length) % 190 for place in range(9))] for length in range(50, 90)]
        first = kit.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        longer = [[*ids, *one.outputs[0].token_ids, 20] for ids, one in zip(prompts, first, strict=True)]
        more = kit.llm.generate([{"prompt_token_ids": ids} for ids in longer], SamplingParams(max_tokens=1), use_tqdm=False)
        return [one.num_cached_tokens for one in more], longer

    quick, plain, steps = both_ways(burst, sample)
    assert quick == plain
    assert min(quick[0]) >= 32 and max(quick[0]) >= 96 and steps > 50


def test_a_caller_that_leaves_takes_its_sequences_along(kit: SimpleNamespace, burst: Burst) -> None:
    settings = {"ignore_eos": True, "max_new_tokens": 90}
    whole, free = sampled(kit, **settings), free_blocks(kit)
    for taken in (1, 5):
        answers = kit.sampler.generate(asked_for(), SamplingSettings(**{"max_new_tokens": 40, "seed": 8}))
        for _ in range(taken):
            next(answers)
        answers.close()
        assert free_blocks(kit) == free and sampled(kit, **settings) == whole


@pytest.mark.parametrize(("before", "error"), [(0, RuntimeError("out of memory")), (20, KeyboardInterrupt("Ctrl-C"))], ids=["at once", "amid"])
def test_a_turn_that_breaks_off_is_seen_and_the_engine_samples_on(kit: SimpleNamespace, burst: Burst, before: int, error: BaseException) -> None:
    settings = {"ignore_eos": True, "max_new_tokens": 60}
    whole, free = sampled(kit, **settings), free_blocks(kit)
    core, sent, count = core_of(kit), burst._sent, iter(range(10_000))

    def fails(output: Any) -> Any:
        if next(count) == before:
            raise error
        return sent(output)

    burst._sent = fails  # type: ignore[method-assign]
    try:
        with pytest.raises(type(error), match=str(error)):
            sampled(kit, **settings)
    finally:
        del burst._sent
    assert not core.scheduler.running and free_blocks(kit) == free
    assert sampled(kit, **settings) == whole


@pytest.mark.parametrize(("room", "groups"), [(150, 12), (5, 1)], ids=["for half of them", "for one sequence"])
def test_sequences_that_find_no_room_give_way_and_come_back(kit: SimpleNamespace, burst: Burst, room: int, groups: int) -> None:
    """Nearly all blocks of the cache are taken by somebody else: the scheduler preempts, and steps go on with the others."""
    settings = {"ignore_eos": True, "max_new_tokens": 90}
    roomy = sampled(kit, asked_for()[:groups], **settings)
    scheduler = core_of(kit).scheduler
    preempted, own = [], scheduler._preempt_request
    scheduler._preempt_request = lambda request, *more, **options: (preempted.append(request.request_id), own(request, *more, **options))[1]
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - room)
    before = burst.steps
    try:
        assert sampled(kit, asked_for()[:groups], **settings) == roomy
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
