"""Torch's flash kernels over packed rows, with shared prompts and without, against float64: outputs, log-sum-exps, gradients, whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rftcli.algo.align import Row, packed, shared
from rftcli.models.flash import PackedAttention, TorchFlash
from rftcli.models.packed_rows import PackedRow, block_mask, read_row
from rftcli.models.policy import CausalPolicy

GROUPS = [(130, [40, 7, 65, 1]), (1, [2, 2]), (64, [33]), (257, [128, 100, 99])]
"""Tokens of each prompt and of its completions."""
ROUNDING = 8e-3
"""Of bfloat16, two roundings on the way."""


def row_of(groups: list[tuple[int, list[int]]]) -> PackedRow:
    parts = [torch.arange(start, prompt + length) for prompt, lengths in groups for start, length in ((0, 0), *((prompt, n) for n in lengths))]
    return read_row(torch.cat(parts)[None], torch.device("cuda"))


def inputs(tokens: int, heads: int, keys: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(tokens, count, width, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for count in (heads, keys, keys)]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    repeats = query.shape[1] // key.shape[1]
    keys, values = (tensor.transpose(0, 1).repeat_interleave(repeats, 0) for tensor in (key, value))
    scores = (query.transpose(0, 1) @ keys.mT * query.shape[-1] ** -0.5).masked_fill(~mask[0, 0], float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1)


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("heads", "keys", "width"), [(4, 4, 64), (14, 2, 64), (12, 2, 128), (8, 1, 256), (4, 2, 72)])
def test_outputs_and_gradients(heads: int, keys: int, width: int, shares: bool) -> None:
    row = row_of(GROUPS if shares else [(prompt, lengths[:1]) for prompt, lengths in GROUPS])
    assert (row.shared is not None) == shares
    given = inputs(sum(family.tokens for family in row.families), heads, keys, width)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    found = PackedAttention.apply(*given, row.own, row.shared, None, TorchFlash())
    expected, _ = dense(*wide, block_mask(row, torch.device("cuda")))
    assert distance(found.detach(), expected.detach()) < ROUNDING
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(9)).cuda()
    got = torch.autograd.grad((found * weights).sum(), given)
    wanted = torch.autograd.grad((expected * weights.bfloat16().double()).sum(), wide)
    assert max(distance(one, other) for one, other in zip(got, wanted, strict=True)) < 2 * ROUNDING


def test_log_sum_exps_of_the_kernel() -> None:
    row = row_of([(130, [40]), (3, [200])])
    given = [tensor.detach() for tensor in inputs(373, 4, 2, 64)]
    _, lse = TorchFlash().forward(*given, row.own, None)
    _, expected = dense(*(tensor.double() for tensor in given), block_mask(row, torch.device("cuda")))
    assert lse.shape == (4, 373) and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, atol=1e-4, rtol=1e-4)


def rows() -> list[Row]:
    generator, found = torch.Generator().manual_seed(1), []
    for group, (prompt, lengths) in enumerate(GROUPS):
        ids = torch.randint(0, 509, (prompt,), generator=generator)
        for length in (*lengths, 0):
            answer = torch.randint(0, 509, (length,), generator=generator)
            found.append(Row(torch.cat([ids, answer]), prompt, torch.ones(length, dtype=torch.bool), group))
    return found


def passes(model: Any, layout: Any, checkpointing: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    laid = layout(rows())
    policy = CausalPolicy(model, gradient_checkpointing=checkpointing).train()
    logprobs, _ = policy(laid.input_ids.cuda(), laid.position_ids, None, laid.select.cuda(), laid.target_ids.cuda(), 0.8)
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, logprobs.numel(), device="cuda")).sum().backward()
    return logprobs.detach().double(), {name: parameter.grad.double() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_is_as_close_to_float64_as_with_a_prompt_for_each_completion(dtype: torch.dtype, checkpointing: bool) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=509, hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.05,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="rft_varlen").to("cuda", dtype)
    found = {layout.__name__: passes(model, layout, checkpointing) for layout in (packed, shared)}
    true, true_gradients = passes(model.double(), packed)
    least = 4e-3 if dtype == torch.bfloat16 else 1e-5
    apart = {name: distance(logprobs, true) for name, (logprobs, _) in found.items()}
    assert apart["shared"] < 2 * max(apart["packed"], least), apart
    for name, gradient in true_gradients.items():
        apart = {layout: distance(gradients[name], gradient) for layout, (_, gradients) in found.items()}
        assert apart["shared"] < 2 * max(apart["packed"], least), (name, apart)
