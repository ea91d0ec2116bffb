"""The own decode step: the scores of the library's forward, the same answers on and off, and who goes through the forward instead."""

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rftcli.engines.decoder import FAMILIES, uncovered
from rftcli.engines.trial import TOLERANCE, Found
from rftcli.types import SamplingSettings

VOCAB = 97
CPU = torch.device("cpu")
SHAPE = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "head_dim": 48, "num_hidden_layers": 3}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
ROWS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, heads of their own": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama, one head of keys": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama, large products": (LlamaForCausalLM, LlamaConfig, WIDE),
    "llama, biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama, gelu": (LlamaForCausalLM, LlamaConfig, {"hidden_act": "gelu"}),
    "llama, linear rotary": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR}),
    "llama, yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2, some biases": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2, large products": (Qwen2ForCausalLM, Qwen2Config, {"hidden_size": 192, "intermediate_size": 640}),
    "qwen3, norms of heads": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
}


def build(name: str):
    family, config, changes = ROWS[name]
    torch.manual_seed(6)
    model = family(config(vocab_size=VOCAB, initializer_range=0.2, max_position_embeddings=256, **{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:  # born as ones and zeros
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


def sampled(kit, model, **changes):
    """((draw, sample) -> ids and log-probs, the engine)"""
    sampler = kit.make_sampler(model, VOCAB, batch_rows=32, eos_ids=tuple(range(2, 8)), **changes)
    requests = [kit.make_request(draw, [(5 + draw * 7 + place * 3) % VOCAB for place in range(1 + draw * 9)]) for draw in range(4)]
    made = sampler.generate(requests, SamplingSettings(max_new_tokens=20, seed=2, temperature=0.9, logprobs=True))
    return {(one.prompt.draw, one.sample): (one.trace.ids, one.trace.logprobs) for one in made}, sampler


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_answers_are_the_same_on_and_off(kit, name: str, continuous: bool) -> None:
    model = build(name)
    own, sampler = sampled(kit, model, continuous=continuous)
    assert sampler.found.plain is None and sampler.found.rows_alike
    plain, sampler = sampled(kit, model, continuous=continuous, own_step=False)
    assert sampler.found.plain == "the own decode step is switched off"
    assert own.keys() == plain.keys() and len({len(ids) for ids, _ in own.values()}) > 3
    for key, (ids, logprobs) in own.items():
        assert ids == plain[key][0] and logprobs == pytest.approx(plain[key][1], abs=1e-4)


def test_every_family_has_a_row() -> None:
    assert {family.__name__ for family, *_ in ROWS.values()} == set(FAMILIES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_number_types_pass_the_trial(kit, dtype: torch.dtype) -> None:
    """Rows of a pass are then fixed, and the scores those of the forward within rounding."""
    found, sampler = sampled(kit, build("qwen3, norms of heads").to(dtype))
    assert sampler.found.plain is None and not sampler.found.rows_alike and dtype in TOLERANCE
    assert len(found) == 16


def test_new_weights_are_read_at_every_rollout(kit) -> None:
    model = build("llama")
    _, sampler = sampled(kit, model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    request, settings = [kit.make_request(0, [5, 9, 11])], SamplingSettings(max_new_tokens=8, seed=0, logprobs=True)
    again = [one.trace for one in sampler.generate(request, settings)]
    assert again == [one.trace for one in kit.make_sampler(model, VOCAB, batch_rows=32, eos_ids=tuple(range(2, 8))).generate(request, settings)]


class Doubled(nn.Linear):
    """Another layer with the name of a known one: what an adapter or a quantised base puts there."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(rows)


class Biased(nn.Module):
    """A norm with the parameters of the known one and another formula, which nothing but the scores can tell."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self._norm = norm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden) + 0.01


def changed(change: str):
    model = build("llama")
    if change == "layer":
        model.model.layers[1].mlp.up_proj = Doubled(64, 172, bias=False)
    elif change == "hook":
        model.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    elif change == "norm":
        model.model.norm = Biased(model.model.norm)
    return model


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("layer", "`model.layers.1.mlp.up_proj` is no plain linear layer, but"),
        ("hook", "`model.layers.0` has hooks"),
        ("norm", "its scores differ by 0."),
    ],
)
def test_what_the_step_does_not_know_goes_through_the_forward(kit, change: str, why: str) -> None:
    model = changed(change)
    found, sampler = sampled(kit, model)
    assert sampler.found.plain.startswith(why)
    assert found == sampled(kit, model, own_step=False)[0]


def test_families_windows_devices_and_rotary_embeddings_that_are_not_covered(kit) -> None:
    mistral = MistralForCausalLM(MistralConfig(vocab_size=VOCAB, sliding_window=8, **SHAPE))
    dynamic = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, **SHAPE))
    assert uncovered(mistral, CPU) == "layers see a window of the last tokens"
    assert uncovered(dynamic, CPU).startswith("the rotary embedding is another one")
    assert uncovered(kit.build_gpt2(VOCAB), CPU) == "the own decode step does not know GPT2LMHeadModel"
    assert uncovered(kit.build_llama(VOCAB), torch.device("cuda")) == "the own decode step is for CPUs"
    assert uncovered(kit.build_llama(VOCAB), CPU) is None


@pytest.mark.parametrize("name", ["llama", "llama, heads of their own", "qwen3, norms of heads"])
def test_padding_that_all_rows_share_is_left_out_without_changing_bits(kit, name: str) -> None:
    """Prompts of 33, 36 and 62 tokens have one bucket. Alone the first two go without 16 positions in front; beside the third none do."""
    model = build(name)
    requests = [kit.make_request(draw, [(7 + draw * 5 + place * 3) % VOCAB for place in range(length)]) for draw, length in enumerate((33, 36, 62))]
    settings = SamplingSettings(max_new_tokens=40, seed=3, logprobs=True)

    def bits(found: Found | None, *parts):
        sampler = kit.make_sampler(model, VOCAB, batch_rows=32, eos_ids=(), found=found)
        made = [one for part in parts for one in sampler.generate(part, settings)]
        return {(one.prompt.draw, one.sample): (one.trace.ids, one.trace.logprobs) for one in made}

    whole = bits(Found(rows_alike=True, plain=None, padding_drops=False), requests)
    sampler = kit.make_sampler(model, VOCAB, batch_rows=32, eos_ids=())
    assert sampler.prove().padding_drops
    assert bits(None, requests) == whole == bits(None, requests[:1], requests[1:2], requests[2:]) == bits(None, requests[:2], requests[2:])
