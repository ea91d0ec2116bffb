"""Completions that share a prompt: two attentions merged by their log-sum-exp are one, both ways, and rows say by themselves who sees whom."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from rftcli.algo.align import Row, packed, shared
from rftcli.errors import UsageError
from rftcli.models.attention import _one_after_another
from rftcli.models.flash import CpuFlash, PackedAttention, Spans, TorchFlash, merge
from rftcli.models.packed_rows import Family, block_mask, families, read_row
from rftcli.models.policy import CausalPolicy

WIDTH, HEADS, KEY_HEADS = 8, 4, 2


class PlainKernel:
    """What the flash kernels compute, in plain operations, in any number type; forward and backward apart, as they are."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None) -> tuple[Tensor, Tensor]:
        scores, values = self._scores(query, key, spans, scale), self._heads(value)
        self.calls.append((len(query), len(key)))
        lse = scores.logsumexp(-1)  # (H, queries)
        return ((scores - lse[..., None]).exp() @ values).transpose(0, 1), lse

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans, scale: float | None):
        probabilities = (self._scores(query, key, spans, scale) - lse[..., None]).exp()
        up, factor = grad.transpose(0, 1), WIDTH**-0.5 if scale is None else scale
        delta = (grad * out).sum(-1).t()[..., None]
        of_scores = probabilities * (up @ self._heads(value).mT - delta) * factor
        of_query = (of_scores @ self._heads(key)).transpose(0, 1)
        return of_query.contiguous(), self._fewer(of_scores.mT @ query.transpose(0, 1)), self._fewer(probabilities.mT @ up)

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).repeat_interleave(HEADS // KEY_HEADS, 0)

    def _fewer(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (KEY_HEADS, -1)).sum(1).transpose(0, 1).contiguous()

    def _scores(self, query: Tensor, key: Tensor, spans: Spans, scale: float | None) -> Tensor:
        """(H, queries, keys), -inf where a query does not look"""
        sides = ((len(query), spans.queries), (len(key), spans.keys))
        of_query, of_key = (torch.bucketize(torch.arange(n), ends[1:].long(), right=True) for n, ends in sides)
        sees = of_query[:, None] == of_key
        if spans.causal:
            sees &= torch.arange(len(query))[:, None] >= torch.arange(len(key))
        scores = query.transpose(0, 1) @ self._heads(key).mT
        return (scores * (WIDTH**-0.5 if scale is None else scale)).masked_fill(~sees, float("-inf"))


def positions_of(groups: list[tuple[int, list[int]]]) -> Tensor:
    """(1, S) of groups as (tokens of the prompt, tokens of each completion)."""
    parts = [torch.arange(prompt) for prompt, _ in groups]
    found = [torch.cat([part, *(torch.arange(prompt, prompt + n) for n in lengths)]) for part, (prompt, lengths) in zip(parts, groups, strict=True)]
    return torch.cat(found)[None]


def tensors(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, WIDTH, generator=generator, dtype=dtype).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Softmax over one matrix of scores with a mask."""
    keys, values = (tensor.transpose(0, 1).repeat_interleave(HEADS // KEY_HEADS, 0) for tensor in (key, value))
    scores = query.transpose(0, 1) @ keys.mT * (WIDTH**-0.5 if scale is None else scale)
    return (scores.masked_fill(~mask[0, 0], float("-inf")).softmax(-1) @ values).transpose(0, 1)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), inputs))


groups_of_rows = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)), min_size=1, max_size=4)
SOME = [(5, [3, 1, 4]), (1, [2, 2]), (4, [6]), (7, [1, 5])]


@settings(max_examples=60, deadline=None)
@given(groups_of_rows, st.sampled_from([None, 0.3]), st.sampled_from([PlainKernel, CpuFlash]))
def test_two_parts_merged_are_one_attention_forward_and_backward(groups, scale, kernel) -> None:
    row = read_row(positions_of(groups))
    inputs = tensors(sum(prompt + sum(lengths) for prompt, lengths in groups))
    found = PackedAttention.apply(*inputs, row.own, row.shared, scale, kernel())
    expected = dense(*inputs, block_mask(row, torch.device("cpu")), scale)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    for got, wanted in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kernel", [PlainKernel, CpuFlash])
def test_finite_differences_of_the_merged_backward(kernel) -> None:
    row = read_row(positions_of([(3, [2, 1]), (2, [2])]))
    assert torch.autograd.gradcheck(lambda *inputs: PackedAttention.apply(*inputs, row.own, row.shared, None, kernel()), tensors(10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_number_types_of_a_cpu(dtype) -> None:
    row, wide = read_row(positions_of(SOME)), tensors(41)
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in wide]
    found = PackedAttention.apply(*inputs, row.own, row.shared, None, CpuFlash())
    expected = dense(*wide, block_mask(row, torch.device("cpu")))
    within = 1e-5 if dtype == torch.float32 else 0.05
    assert found.dtype == dtype and float((found.double() - expected).detach().abs().max()) < within
    for got, wanted in zip(gradients(found, inputs), gradients(expected, wide), strict=True):
        assert got.dtype == dtype and float((got.double() - wanted).abs().max()) < 4 * within


def test_each_part_goes_through_the_kernel_once_and_prompts_once() -> None:
    row, kernel = read_row(positions_of(SOME)), PlainKernel()
    PackedAttention.apply(*tensors(41), row.own, row.shared, None, kernel)
    assert kernel.calls == [(41, 41), (18, 13)]  # all to themselves; completions of the three groups that share, to their prompts
    assert row.shared.spans.queries.tolist() == [0, 8, 12, 18] and row.shared.spans.keys.tolist() == [0, 5, 6, 13]
    assert (row.shared.spans.most_queries, row.shared.spans.most_keys, row.own.most_queries) == (8, 7, 10)


def test_a_merge_of_halves_has_their_mean_and_log_of_the_sum() -> None:
    one, other = torch.zeros(1, 1, 2), torch.full((1, 1, 2), 4.0)
    out, lse = merge(one, torch.zeros(1, 1), other, torch.zeros(1, 1))
    assert out.tolist() == [[[2.0, 2.0]]] and float(lse) == pytest.approx(0.6931472)
    out, lse = merge(one, torch.full((1, 1), -1000.0), other, torch.zeros(1, 1))
    assert out.tolist() == [[[4.0, 4.0]]] and float(lse) == 0.0


@settings(max_examples=40, deadline=None)
@given(groups_of_rows)
def test_one_completion_after_another_is_the_same_attention(groups) -> None:
    """The way without flash kernels, in float64."""
    row = read_row(positions_of(groups))
    inputs = tensors(sum(prompt + sum(lengths) for prompt, lengths in groups), seed=3)
    found = _one_after_another(*(tensor.transpose(0, 1)[None] for tensor in inputs), row, None)[0]
    expected = dense(*inputs, block_mask(row, torch.device("cpu")))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    for got, wanted in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


@settings(max_examples=60, deadline=None)
@given(groups_of_rows)
def test_positions_alone_tell_who_shares_a_prompt(groups) -> None:
    found = families(positions_of(groups)[0])
    starts = [sum(prompt + sum(lengths) for prompt, lengths in groups[:index]) for index in range(len(groups))]
    expected = []
    for start, (prompt, lengths) in zip(starts, groups, strict=True):  # a prompt with one completion is one sequence
        alone = len(lengths) == 1
        expected.append(Family(start=start, prompt=0 if alone else prompt, parts=(prompt + lengths[0],) if alone else tuple(lengths)))
    assert list(found) == expected


def test_the_mask_by_hand() -> None:
    seen = block_mask(read_row(torch.tensor([[0, 1, 2, 3, 2, 0]])), torch.device("cpu"))[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for group, (prompt, lengths) in enumerate([(5, (3, 1, 0, 4)), (1, (2, 2)), (4, (6,)), (3, (0, 0)), (7, (0, 1, 5))]):
        ids = torch.randint(97, (prompt,), generator=generator)
        for length in lengths:
            mask = torch.rand(length, generator=generator) > 0.2
            found.append(Row(torch.cat([ids, torch.randint(97, (length,), generator=generator)]), prompt, mask, group))
    return found


def through(policy: CausalPolicy, inputs) -> Tensor:
    return policy(inputs.input_ids, inputs.position_ids, inputs.attention_mask, inputs.select, inputs.target_ids, 0.7)[0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["rft_varlen", "sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_log_probs_and_gradients_are_those_of_packed_rows(zoo, family, attention, checkpointing) -> None:
    model = getattr(zoo, family)().eval()
    model.config._attn_implementation = attention
    policy = CausalPolicy(model, gradient_checkpointing=checkpointing)
    if checkpointing:
        policy.train()
    found = []
    for layout in (packed, shared):
        model.zero_grad()
        values = through(policy, layout(rows()))
        (values * torch.linspace(-1, 2, values.numel())).sum().backward()
        found.append([values.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert shared(rows()).input_ids.numel() < packed(rows()).input_ids.numel()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5 * float(one.abs().max()), rtol=0.0)


def test_completions_do_not_see_each_other_and_all_see_the_prompt(zoo) -> None:
    model = zoo.llama().eval()
    model.config._attn_implementation = "rft_varlen"
    ids = torch.arange(2, 8)

    def values(prompt: Tensor, second: Tensor) -> list[Tensor]:
        made = [Row(torch.cat([prompt, answer]), 6, torch.ones(len(answer), dtype=torch.bool), 0) for answer in (torch.tensor([9, 8, 7]), second)]
        return list(through(CausalPolicy(model), shared(made)).split(3))

    before, changed = values(ids, torch.tensor([4, 5, 6])), values(ids, torch.tensor([40, 50, 60]))
    assert torch.equal(before[0], changed[0]) and not torch.equal(before[1], changed[1])
    other = values(ids.flip(0), torch.tensor([4, 5, 6]))
    assert not torch.equal(before[0], other[0]) and not torch.equal(before[1], other[1])


@pytest.mark.parametrize("attention", ["rft_varlen", "sdpa", "eager"])
@pytest.mark.parametrize(("window", "refused"), [(4, True), (500, False), (None, False)])
def test_a_window_that_cuts_something_off_is_refused_by_name(attention, window, refused) -> None:
    torch.manual_seed(6)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
    model = MistralForCausalLM(MistralConfig(vocab_size=97, sliding_window=window, **shape)).eval()
    model.config._attn_implementation = attention
    if refused:
        with pytest.raises(UsageError, match=r"sliding window of Mistral.* does not go with shared prompts"):
            through(CausalPolicy(model), shared(rows()))
    else:
        torch.testing.assert_close(through(CausalPolicy(model), shared(rows())), through(CausalPolicy(model), packed(rows())), atol=1e-5, rtol=1e-5)


def test_flash_attn_refuses_by_name(zoo) -> None:
    model = zoo.llama().eval()
    model.config._attn_implementation = "rft_flash_2"
    with pytest.raises(UsageError, match="does not go with shared prompts"):
        through(CausalPolicy(model), shared(rows()))


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_torchs_kernels_take_what_they_are_given(shares, window) -> None:
    """Signatures and shapes, by tensors without numbers: what the kernels compute only a GPU can show."""
    meta = torch.device("meta")
    row = read_row(positions_of(SOME), meta)
    own = replace(row.own, window=window)
    inputs = [torch.empty(41, heads, 64, dtype=torch.bfloat16, device=meta).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    found = PackedAttention.apply(*inputs, own, row.shared if shares else None, 0.1, TorchFlash())
    assert found.shape == (41, HEADS, 64) and found.dtype == torch.bfloat16
    found.sum().backward()
    assert [tensor.grad.shape for tensor in inputs] == [tensor.shape for tensor in inputs]
