"""Attention over the sequences of a packed row with torch's flash kernels, and of completions to a prompt that they share.

A completion attends to its prompt, whole, and to itself, causally. The two parts are two calls of a kernel, merged by the log-sum-exp of their
scores. Backward, each part is one call that is given the merged output and the merged log-sum-exp: then every probability is already the one of the
softmax over both (as in ring attention, arXiv:2310.01889), so the gradients of the parts add up.

The kernels are aten's own. Fewer heads of keys than of queries are known to those of CUDA, so nothing is repeated there. Leaves out dropout and other
masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST_LENGTH = 2
"""Told to the kernels as the longest sequence at least: a longest one of 1 is another, decoding, path of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Sequences of queries and the keys that each of them sees: sequence i is ends[i]..ends[i + 1]."""

    queries: Tensor
    """(sequences + 1,) int32"""
    keys: Tensor
    most_queries: int
    """Of a sequence."""
    most_keys: int
    causal: bool
    """Query j sees keys up to j; else all of its sequence."""
    window: int | None = None
    """With `causal`: so many keys at most, its own among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """The completions of a row that attend to the prompt in front of them, all of one prompt together as one sequence of queries."""

    completions: Tensor
    """(R,) int64 places in the row"""
    prompts: Tensor
    """(K,) int64 places in the row"""
    spans: Spans
    """Of queries at `completions` and keys at `prompts`."""


class Kernel(Protocol):
    """Tensors are (tokens, heads, width), log-sum-exps (heads, tokens) float32 or wider."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp of the scaled scores)"""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, where exp(scores - lse) are the probabilities and `out` what came of all of them."""
        ...


class TorchFlash:
    """aten's variable-length flash attention: CUDA, half precision."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._flash_attention_forward(
            query, key, value, spans.queries, spans.keys, max(LEAST_LENGTH, spans.most_queries), max(LEAST_LENGTH, spans.most_keys), 0.0,
            spans.causal and spans.window is None, False, scale=scale, **_sides(spans),
        )  # fmt: skip
        return found[0], found[1]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = _no_random_state(query.device)
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, spans.queries, spans.keys, max(LEAST_LENGTH, spans.most_queries),
            max(LEAST_LENGTH, spans.most_keys), 0.0, spans.causal and spans.window is None, *nothing, scale=scale, **_sides(spans),
        )  # fmt: skip


class CpuFlash:
    """aten's flash attention of a CPU, sequence by sequence: every floating type, no windows."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None) -> tuple[Tensor, Tensor]:
        parts = []
        for asks, sees in _sequences(spans):
            q, k, v = _batched(query[asks]), *self._repeated(query, key[sees], value[sees])
            parts.append(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, spans.causal, scale=scale))
        return torch.cat([_flat(out) for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_query, of_key, of_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        heads = key.shape[1]
        for asks, sees in _sequences(spans):
            q, k, v = _batched(query[asks]), *self._repeated(query, key[sees], value[sees])
            own = lse[:, asks].t().contiguous().t()[None]  # laid out as the forward pass leaves it
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _batched(grad[asks]), q, k, v, _batched(out[asks]), own, 0.0, spans.causal, scale=scale
            )
            of_query[asks] = _flat(found[0])
            of_key[sees], of_value[sees] = (_flat(each).unflatten(1, (heads, -1)).sum(2) for each in found[1:])
        return of_query, of_key, of_value

    def _repeated(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        groups = query.shape[1] // key.shape[1]
        if groups == 1:
            return _batched(key), _batched(value)
        return _batched(key.repeat_interleave(groups, 1)), _batched(value.repeat_interleave(groups, 1))


def _sequences(spans: Spans) -> list[tuple[slice, slice]]:
    """Places of the queries and of the keys of each sequence."""
    asks, sees = ([slice(*pair) for pair in pairwise(ends.tolist())] for ends in (spans.queries, spans.keys))
    return list(zip(asks, sees, strict=True))


def _batched(tensor: Tensor) -> Tensor:
    """(tokens, heads, width) -> (1, heads, tokens, width)"""
    return tensor.transpose(0, 1)[None]


def _flat(tensor: Tensor) -> Tensor:
    return tensor[0].transpose(0, 1)


def _sides(spans: Spans) -> dict[str, int]:
    return {} if spans.window is None else {"window_size_left": spans.window - 1, "window_size_right": 0}


@cache
def _no_random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that there is not."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


class PackedAttention(torch.autograd.Function):
    """Every sequence of a row to itself, causally, and completions to the prompt that they share."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, own: Spans, shared: SharedPrompts | None, scale: float | None, kernel: Kernel
    ) -> Tensor:
        """query (S, H, D), key and value (S, K, D) -> (S, H, D)."""
        out, lse = kernel.forward(query, key, value, own, scale)
        if shared is not None:
            places = shared.completions
            mine, keys, values = _parts(query, key, value, shared)
            over, over_lse = kernel.forward(mine, keys, values, shared.spans, scale)
            merged, both = merge(out.index_select(0, places), lse.index_select(1, places), over, over_lse)
            out.index_copy_(0, places, merged)
            lse.index_copy_(1, places, both)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.own, ctx.shared, ctx.scale, ctx.kernel = own, shared, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        shared, grad = ctx.shared, grad.contiguous()
        of_query, of_key, of_value = ctx.kernel.backward(grad, query, key, value, out, lse, ctx.own, ctx.scale)
        if shared is not None:
            places = shared.completions
            mine, keys, values = _parts(query, key, value, shared)
            more = ctx.kernel.backward(
                grad.index_select(0, places), mine, keys, values, out.index_select(0, places), lse.index_select(1, places), shared.spans, ctx.scale
            )
            _add(of_query, places, more[0])
            _add(of_key, shared.prompts, more[1])
            _add(of_value, shared.prompts, more[2])
        return of_query, of_key, of_value, None, None, None, None


def merge(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions of the same queries (tokens, heads, width) over different keys, as one over all of them; log-sum-exps (heads, tokens)."""
    both = torch.logaddexp(one_lse, other_lse)
    weight = (one_lse - both).exp().t()[..., None]  # (tokens, heads, 1) of the first
    wide = torch.promote_types(one.dtype, both.dtype)
    return torch.lerp(other.to(wide), one.to(wide), weight.to(wide)).to(one.dtype), both


def _parts(query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts) -> tuple[Tensor, Tensor, Tensor]:
    return query.index_select(0, shared.completions), key.index_select(0, shared.prompts), value.index_select(0, shared.prompts)


def _add(into: Tensor, places: Tensor, what: Tensor) -> None:
    """Places are distinct, so that no sum depends on an order."""
    into.index_copy_(0, places, into.index_select(0, places) + what)
