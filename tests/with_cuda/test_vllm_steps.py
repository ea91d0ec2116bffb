"""vLLM on a GPU, where steps are read one later than they are sent: several for a turn of the scheduler sample what vLLM's own turns sample."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import rollout_vllm
from rftcli.builtin import builtin_path
from rftcli.engines.vllm_decode import quicken
from rftcli.models.load import load_tokenizer
from rftcli.runtime.engine_process import UNLESS_SET
from rftcli.runtime.vllm_engine import ALWAYS
from rftcli.types import Prompt, Request, SamplingSettings

PROMPTS, SAMPLES, NEW = 24, 8, 100
ASKED: dict[str, dict[str, Any]] = {
    "no ends": {"ignore_eos": True},
    "greedy": {"ignore_eos": True, "temperature": 0.0},
    "ends": {"stop_token_ids": tuple(range(5, 12))},
    "log-probs": {"stop_token_ids": tuple(range(5, 8)), "logprobs": True},
    "penalties": {"stop_token_ids": tuple(range(5, 12)), "repetition_penalty": 1.3, "min_new_tokens": 40},
}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    pytest.importorskip("vllm", reason="pip install 'rftcli[vllm]'")
    os.environ.update(ALWAYS | UNLESS_SET | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"})
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('meet') / 'file'}", rank=0, world_size=1)
    asked = Namespace(
        model=None, shape="tiny", dtype="bfloat16", prompts=16, samples=SAMPLES, prompt_tokens=64, new_tokens=NEW, memory_share=0.1, seeds="request",
        options="{}",
    )  # fmt: skip
    device = torch.device("cuda", 0)
    model, tokenizer = rollout_vllm.trainers_model(asked, device), load_tokenizer(str(builtin_path("quickstart")))
    llm, sampler = rollout_vllm.engine(asked, model, tokenizer, device)
    sampler.load(((name, parameter.data) for name, parameter in model.named_parameters()), 0)
    yield SimpleNamespace(llm=llm, sampler=sampler)
    sampler.close()


def sampled(kit: SimpleNamespace, **settings: Any) -> dict[tuple[int, int], tuple[Any, ...]]:
    """More rows than the engine holds at once."""
    draw = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 250, (5 + 2 * number,), generator=draw).tolist()) for number in range(PROMPTS)]
    requests = [
        Request(prompt=Prompt(draw=number, row=0, row_id="t:0", source="t", label="l", text="", token_ids=ids), samples=tuple(range(SAMPLES)))
        for number, ids in enumerate(prompts)
    ]
    made = kit.sampler.generate(requests, SamplingSettings(**{"max_new_tokens": NEW, "seed": 3} | settings))
    return {(one.prompt.draw, one.sample): (one.trace.ids, one.trace.logprobs, one.finish) for one in made}


@pytest.mark.parametrize("asked", ASKED)
def test_several_steps_for_a_turn_of_the_scheduler(kit: SimpleNamespace, asked: str) -> None:
    """In bfloat16 a row's last bits depend on its company, so some rows may differ, as they do between two of vLLM's own rollouts."""
    burst = quicken(kit.llm)
    assert burst is not None
    before = burst.steps
    quick = sampled(kit, **ASKED[asked])
    steps = burst.steps - before
    burst.undo()
    try:
        own, again = sampled(kit, **ASKED[asked]), sampled(kit, **ASKED[asked])
    finally:
        burst.use()
    same, usual = (sum(found[key][0] == own[key][0] for key in own) for found in (quick, again))
    print(f"{asked}: {same} of {len(own)} rows the same (vLLM's own again: {usual}), {steps} steps")
    assert len(quick) == len(own) == PROMPTS * SAMPLES and steps > 10
    assert same >= 0.9 * usual
