"""The proof before the first rollout: an engine with other weights, temperature or filters than the trainer's stops every rank alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import on_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from rftcli.errors import RftError
from rftcli.models.policy import CausalPolicy
from rftcli.plan.plan import Plan
from rftcli.plan.plan_engine import VllmPlan
from rftcli.runtime import engine_probe
from rftcli.runtime.prepare import prepare
from rftcli.runtime.world import SoloWorld
from rftcli.types import Completion, FinishReason, Request, SamplingSettings, TokenTrace

VOCABULARY = 61


def tiny(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(config).eval()


class Engine:
    """Tells the log-probs of its own model, at a temperature times `warmer`, of tokens that are fixed."""

    def __init__(self, model: LlamaForCausalLM, warmer: float = 1.0) -> None:
        self.model, self.warmer = model, warmer
        self.asked: list[Request] = []
        self.settings: SamplingSettings | None = None

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
        self.asked, self.settings = list(requests), settings
        for request in reversed(requests):  # in any order
            prompt = request.prompt.token_ids
            ids = tuple((7 * place + len(prompt)) % VOCABULARY for place in range(settings.max_new_tokens))
            scores = self.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / (settings.temperature * self.warmer)
            told = scores.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
            trace = TokenTrace(ids=ids, logprobs=tuple(told), segments=((0, 0),))
            yield Completion(
                prompt=request.prompt, sample=0, text="", text_with_special="", trace=trace, finish=FinishReason.LENGTH, policy_version=0
            )


@pytest.fixture(scope="module")
def plan() -> Plan:
    plain = prepare(Path("quickstart"), (), ranks=1, gpus=None).plan
    engine = VllmPlan(
        tensor_parallel=1, max_model_tokens=64, max_sequences=8, memory_share=None, cache_bytes=4096, sleep=0, graphs=False, seeds="auto",
        check_weights=False,
    )  # fmt: skip
    return replace(plain, rollout=replace(plain.rollout, engine="vllm", vllm=engine, temperature=0.7, top_p=0.9, top_k=5))


def job(plan: Plan, engine: Engine, world: Any = None) -> Any:
    model = tiny()
    logged: list[str] = []
    return SimpleNamespace(
        plan=plan, model=model, sampler=engine, roles=SimpleNamespace(policy=CausalPolicy(model)), world=world or SoloWorld(), pad_id=0,
        device=torch.device("cpu"), emit=SimpleNamespace(log=logged.append), logged=logged,
    )  # fmt: skip


def test_the_same_model_agrees_whatever_the_recipe_filters(plan: Plan) -> None:
    engine = Engine(tiny())
    found = job(plan, engine)
    assert engine_probe.prove(found) < 1e-5 and "log-probs differ by" in found.logged[0]
    assert engine.settings is not None and engine.settings.logprobs and engine.settings.temperature == 0.7
    assert (engine.settings.top_p, engine.settings.top_k, engine.settings.min_p, engine.settings.ignore_eos) == (1.0, 0, 0.0, True)
    assert [len(request.prompt.token_ids) for request in engine.asked] == [24, 3, 17, 9]


def test_prompts_and_answers_fit_a_short_engine(plan: Plan) -> None:
    engine = Engine(tiny())
    short = replace(plan, rollout=replace(plan.rollout, vllm=replace(plan.rollout.vllm, max_model_tokens=20)))
    engine_probe.prove(job(short, engine))
    assert engine.settings is not None and max(len(one.prompt.token_ids) + engine.settings.max_new_tokens for one in engine.asked) == 20


@pytest.mark.parametrize("engine", [Engine(tiny(1)), Engine(tiny(), warmer=1.2)], ids=["weights", "temperature"])
def test_another_policy_stops_the_run(plan: Plan, engine: Engine) -> None:
    with pytest.raises(RftError, match=r"differ from the trainer's by .*at most 0\.001 is accepted"):
        engine_probe.prove(job(plan, engine))


def test_what_is_not_a_number_stops_it_too(plan: Plan) -> None:
    broken = tiny()
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    with pytest.raises(RftError, match="by nan nats"):
        engine_probe.prove(job(plan, Engine(broken)))


def test_ranks_stop_together(plan: Plan) -> None:
    """One of two engines is wrong: both ranks hear of it, with the same number."""

    def work(world: Any) -> str:
        with pytest.raises(RftError) as raised:
            engine_probe.prove(job(plan, Engine(tiny(world.rank)), world))
        return raised.value.message

    first, second = on_ranks(2, work)
    assert first == second
