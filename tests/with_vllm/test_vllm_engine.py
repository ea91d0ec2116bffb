"""The real engine in this process, over the quickstart model: weights, log-probs, ends, penalties, forms."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rftcli.builtin import builtin_path
from rftcli.engines.vllm import VLLMSampler, start
from rftcli.engines.vllm_weights import held_by
from rftcli.errors import RftError
from rftcli.models.load import load_causal_lm, load_tokenizer
from rftcli.runtime.vllm_engine import ALWAYS, UNLESS_SET, config_folder
from rftcli.runtime.world import SoloWorld
from rftcli.types import Completion, FinishReason, Prompt, Request, SamplingSettings

QUESTION = (1, 51, 28, 223, 24, 21, 15, 18, 19, 222, 35, 28)
END = 2


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    os.environ.update(ALWAYS | UNLESS_SET | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    path = str(builtin_path("quickstart"))
    model = load_causal_lm(path, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()
    tokenizer = load_tokenizer(path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('meet') / 'file'}", rank=0, world_size=1)
    arguments = {
        "load_format": "dummy", "dtype": "float32", "distributed_executor_backend": "external_launcher", "enforce_eager": True,
        "kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 128, "max_num_seqs": 64, "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm", "enable_prefix_caching": True,
    }  # fmt: skip
    llm, params, fields, free = start(str(config_folder(model, tokenizer, "float32")), arguments, {})
    assert free, "a CPU draws with a seed a row at no cost"
    sampler = VLLMSampler(
        llm, params, fields, model, tokenizer, (END,), world=SoloWorld(), seeded=True, check=True, dtype=torch.float32, device=torch.device("cpu")
    )
    yield SimpleNamespace(model=model, tokenizer=tokenizer, sampler=sampler, llm=llm)
    sampler.close()  # vLLM ends the process group with the process


def weights(kit: SimpleNamespace, change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor) -> Iterator[Any]:
    return ((name, change(name, parameter.data)) for name, parameter in kit.model.named_parameters())


def sample(kit: SimpleNamespace, samples: int = 8, draw: int = 0, **changes: Any) -> list[Completion]:
    prompt = Prompt(draw=draw, row=0, row_id="t:0", source="t", label="l", text="", token_ids=QUESTION)
    settings = SamplingSettings(**{"max_new_tokens": 24, "seed": 0, **changes})
    made = kit.sampler.generate([Request(prompt=prompt, samples=tuple(range(samples)))], settings)
    return sorted(made, key=lambda one: one.sample)


@torch.no_grad()
def trainers_logprobs(kit: SimpleNamespace, made: Completion) -> torch.Tensor:
    ids = torch.tensor([[*QUESTION, *made.trace.ids]])
    scores = kit.model(input_ids=ids).logits[0, len(QUESTION) - 1 : -1].float().log_softmax(-1)
    return scores.gather(-1, ids[0, len(QUESTION) :, None])[:, 0]


def test_it_refuses_to_sample_before_the_first_push(kit: SimpleNamespace) -> None:
    kit.sampler.version = None
    with pytest.raises(RftError, match="no weights yet"):
        sample(kit)


def test_log_probs_are_the_trainers(kit: SimpleNamespace) -> None:
    kit.sampler.load(weights(kit), 1)
    for made in sample(kit, logprobs=True):
        assert made.trace.logprobs is not None and made.policy_version == 1
        assert torch.allclose(torch.tensor(made.trace.logprobs), trainers_logprobs(kit, made), atol=1e-4)


def test_new_weights_arrive_whole_and_change_the_samples(kit: SimpleNamespace) -> None:
    kit.sampler.load(weights(kit), 1)
    before = [made.trace.ids for made in sample(kit)]
    assert before == [made.trace.ids for made in sample(kit)]  # seeds of their own, the same company
    kit.sampler.load(weights(kit, lambda name, tensor: tensor * 0.7), 2)  # `check`: compared bit for bit
    assert before != [made.trace.ids for made in sample(kit)]
    kit.sampler.load(weights(kit), 3)
    assert before == [made.trace.ids for made in sample(kit)]


def test_a_stale_weight_is_found(kit: SimpleNamespace) -> None:
    """One number of one packed layer, by one unit in the last place; and the head's packed copy of a shared weight."""
    kit.sampler.load(weights(kit), 1)
    engine = kit.llm.apply_model(lambda model: model)[0]
    whole = held_by(engine).total

    def nudged(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.endswith("layers.1.mlp.down_proj.weight"):
            return tensor
        changed = tensor.clone()
        changed[3, 4] = torch.nextafter(changed[3, 4], torch.tensor(100.0))
        return changed

    kit.sampler.load(weights(kit, nudged), 2)
    assert abs(held_by(engine).total - whole) == 1
    engine.lm_head.weight.data[0, 0] += 1.0
    with pytest.raises(RftError, match=r"packed copy of `lm_head.weight` is not its weight"):
        held_by(engine)
    kit.sampler.load(weights(kit), 3)


def test_ends(kit: SimpleNamespace) -> None:
    kit.sampler.load(weights(kit), 1)
    for made in sample(kit, 16):
        ended = made.trace.ids[-1] == END
        assert made.finish is (FinishReason.STOP if ended else FinishReason.LENGTH) and END not in made.trace.ids[:-1]
    assert all(len(made.trace.ids) == 12 and made.finish is FinishReason.LENGTH for made in sample(kit, ignore_eos=True, max_new_tokens=12))
    assert all(END not in made.trace.ids[:10] for made in sample(kit, min_new_tokens=10))
    stopped = [made for made in sample(kit, 16, stop=("####",)) if made.finish is FinishReason.STOP]
    assert stopped and all(made.text.endswith("####") or made.trace.ids[-1] == END for made in stopped)
    wanted = sample(kit, 1, temperature=0.0)[0].trace.ids
    at = sample(kit, 1, temperature=0.0, stop_token_ids=(wanted[1],))[0]
    assert at.finish is FinishReason.STOP and at.trace.ids == wanted[: wanted.index(wanted[1]) + 1]


def test_greedy_is_the_trainers_argmax(kit: SimpleNamespace) -> None:
    kit.sampler.load(weights(kit), 1)
    made = sample(kit, 1, temperature=0.0, logprobs=True)[0]
    ids = torch.tensor([[*QUESTION, *made.trace.ids]])
    with torch.no_grad():
        best = kit.model(input_ids=ids).logits[0, len(QUESTION) - 1 : -1].argmax(-1)
    assert tuple(best.tolist()) == made.trace.ids and set(made.trace.logprobs or ()) == {0.0}


def test_what_shapes_the_samples(kit: SimpleNamespace) -> None:
    kit.sampler.load(weights(kit), 1)
    assert all(made.trace.ids[0] == 40 for made in sample(kit, logit_bias={"40": 100.0}))
    assert any("####" in made.text for made in sample(kit, 16))
    assert all("####" not in made.text for made in sample(kit, 16, bad_words=("####",)))
    plain = [made.trace.ids for made in sample(kit)]
    assert plain != [made.trace.ids for made in sample(kit, repetition_penalty=2.0, presence_penalty=1.0)]
    assert len({made.trace.ids for made in sample(kit, top_k=1)}) == 1 == len({made.trace.ids for made in sample(kit, min_p=0.999)})
    formed = sample(kit, structured={"regex": "[0-9]{3}"})
    assert all(len(made.text) == 3 and made.text.isdecimal() and made.finish is FinishReason.STOP for made in formed)


def in_two(kit: SimpleNamespace, cut: int, samples: int, **changes: Any) -> list[Completion]:
    """Up to `cut`, and what has not ended on to its end in a second call."""
    first = sample(kit, samples, max_new_tokens=cut, **changes)
    settings = SamplingSettings(**{"max_new_tokens": 24, "seed": 0, **changes})
    open_ones = {made.sample: made.trace for made in first if made.finish is FinishReason.LENGTH}
    rest = kit.sampler.generate([Request(prompt=first[0].prompt, samples=tuple(open_ones), partial=open_ones)], settings)
    return sorted([*rest, *(made for made in first if made.sample not in open_ones)], key=lambda made: made.sample)


def test_an_interrupted_answer_goes_on(kit: SimpleNamespace) -> None:
    """Greedy, it is the one that was not interrupted, stop strings across the cut included; sampled, its log-probs are the trainer's."""
    kit.sampler.load(weights(kit), 1)
    (whole,) = sample(kit, 1, temperature=0.0, ignore_eos=True)
    pieces = [kit.tokenizer.decode([token]) for token in whole.trace.ids]
    stop = next(left[-1] + right[0] for left, right in pairwise(pieces[2:]) if left and right)
    stopped = sample(kit, 1, temperature=0.0, ignore_eos=True, stop=(stop,))[0]
    assert stopped.finish is FinishReason.STOP
    for cut in range(1, len(stopped.trace.ids) + 1):
        assert in_two(kit, cut, 1, temperature=0.0, ignore_eos=True)[0].trace.ids == whole.trace.ids
        assert in_two(kit, cut, 1, temperature=0.0, ignore_eos=True, stop=(stop,))[0].trace.ids == stopped.trace.ids
    for made in in_two(kit, 5, 16, logprobs=True):
        assert made.trace.logprobs is not None
        assert torch.allclose(torch.tensor(made.trace.logprobs), trainers_logprobs(kit, made), atol=1e-4)


def test_requests_have_limits_of_their_own(kit: SimpleNamespace) -> None:
    kit.sampler.load(weights(kit), 1)
    prompt = Prompt(draw=0, row=0, row_id="t:0", source="t", label="l", text="", token_ids=QUESTION)
    requests = [Request(prompt=prompt, samples=(0,), limit=3), Request(prompt=prompt, samples=(1,), limit=9), Request(prompt=prompt, samples=(2,))]
    settings = SamplingSettings(max_new_tokens=12, min_new_tokens=6, seed=0, ignore_eos=True)
    assert {made.sample: len(made.trace.ids) for made in kit.sampler.generate(requests, settings)} == {0: 3, 1: 9, 2: 12}
