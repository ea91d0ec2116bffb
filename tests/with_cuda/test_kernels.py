"""The real fused kernels against the models' own passes: log-probs, gradients, a cache, recomputed layers, adapters.

The measure is a model in float64, whose norms alone round to float32. In float32 both come as close as rounding lets them; in
bfloat16 the kernels may be no further away than the passes that they replace, but for a factor that two orders of rounding differ by.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("liger_kernel", reason="pip install 'rftcli[liger]'")

from rftcli.algo.align import Row, packed, padded
from rftcli.models import lora
from rftcli.models.kernels import apply
from rftcli.models.policy import CausalPolicy

SHAPE = {
    "vocab_size": 509, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.1, "attn_implementation": "eager",
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=64)),
}
ROWS = [(9, 41), (1, 1), (30, 7), (3, 120)]
"""Tokens of prompt and answer."""
FACTOR = 2.0
"""How much further from float64 the kernels may be than the passes that they replace."""

Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


@pytest.fixture(autouse=True, params=list(MODELS))
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The rotary embedding of the family is its own again afterwards."""
    modeling = __import__(f"transformers.models.{request.param}.modeling_{request.param}", fromlist=["apply_rotary_pos_emb"])
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)
    return request.param


def make(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    return MODELS[family]().to("cuda", dtype).eval()


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    return [
        Row(torch.randint(0, 509, (prompt + answer,), generator=generator), prompt, torch.ones(answer, dtype=torch.bool)) for prompt, answer in ROWS
    ]


def passes(model: Any, layout: str, **changes: Any) -> Found:
    """(log-probs of the answers, the gradient of a weighted sum of them by name), float64 on the CPU."""
    inputs = {"padded": lambda: padded(rows(), 0), "packed": lambda: packed(rows())}[layout]()
    names = ("input_ids", "position_ids", "attention_mask", "select", "target_ids")
    given = {name: value if value is None else value.cuda() for name, value in ((name, getattr(inputs, name)) for name in names)}
    logprobs, _ = CausalPolicy(model, **changes)(**given, temperature=0.8)
    weights = torch.linspace(-1, 1, logprobs.numel(), device="cuda")
    model.zero_grad()
    (logprobs * weights).sum().backward()
    gradients = {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logprobs.detach().double().cpu(), gradients


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    """Root mean square of the difference over that of the true values."""
    return float((found - true).norm() / true.norm().clamp(min=1e-12))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_as_close_to_the_truth(family: str, dtype: torch.dtype, rounding: float, layout: str) -> None:
    exact = passes(make(family, dtype).double(), "packed")  # with weights that `dtype` holds; padding that sees nothing is NaN in float64
    plain = passes(make(family, dtype), layout)
    model = make(family, dtype)
    apply(model)
    fused = passes(model, layout)
    assert not torch.equal(fused[0], plain[0]), "the kernels did not run"
    assert list(fused[1]) == list(plain[1])
    worst = {name: distance(fused[1][name], exact[1][name]) for name in exact[1]}
    usual = {name: distance(plain[1][name], exact[1][name]) for name in exact[1]}
    print(f"{family} {dtype} {layout}: log-probs {distance(fused[0], exact[0]):.1e} (plain {distance(plain[0], exact[0]):.1e}),", end=" ")
    print(f"gradients at most {max(worst.values()):.1e} (plain {max(usual.values()):.1e})")
    assert distance(fused[0], exact[0]) <= FACTOR * distance(plain[0], exact[0]) + rounding
    assert not {name: (worst[name], usual[name]) for name in worst if worst[name] > FACTOR * usual[name] + rounding}


def test_a_pass_repeats_to_the_bit(family: str) -> None:
    model = make(family, torch.bfloat16)
    apply(model)
    first, second = passes(model, "padded"), passes(model, "padded")
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1] if "norm" in name or "mlp" in name)


def test_layers_that_are_computed_again(family: str) -> None:
    model = make(family, torch.float32).train()
    apply(model)
    kept, again = passes(model, "padded"), passes(model, "padded", gradient_checkpointing=True)
    assert torch.equal(kept[0], again[0])
    assert all(distance(again[1][name], kept[1][name]) < 1e-5 for name in kept[1])


def test_a_cache_without_gradients(family: str) -> None:
    """What an engine on the same weights does: a prompt, then a token at a time."""
    model = make(family, torch.float32)
    ids = torch.randint(0, 509, (3, 12), generator=torch.Generator().manual_seed(2)).cuda()
    with torch.no_grad():
        expected = model(ids).logits
        apply(model)
        found = model(ids[:, :8], use_cache=True)
        scores = [found.logits]
        for column in range(8, 12):
            found = model(ids[:, column : column + 1], past_key_values=found.past_key_values, use_cache=True)
            scores.append(found.logits)
    assert distance(torch.cat(scores, dim=1).double(), expected.double()) < 1e-5


def test_adapters(family: str) -> None:
    plain = make(family, torch.bfloat16)
    fused = deepcopy(plain)
    for model in (plain, fused):
        torch.manual_seed(5)
        if model is fused:
            apply(model)
        lora.attach(model, rank=4, alpha=8, dropout=0.0, targets="all-linear", save_also=(), options={}, start_from=None, base_name="m")
    # the plain one shares the family's rotary embedding by now: norms, gated layers and what adapters get of them are compared
    expected, found = passes(plain, "padded"), passes(fused, "padded")
    assert distance(found[0], expected[0]) < 2e-2
    trained = [name for name in expected[1] if expected[1][name].any()]
    assert trained and all(distance(found[1][name], expected[1][name]) < 0.1 for name in trained)
