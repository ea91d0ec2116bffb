"""One token of every row through a standard decoder: what transformers' forward computes, from the model's own parameters, in a third of the calls.

Of a small model's decode step most is Python: modules, masks, caches and arguments that are made anew for one token. Here a layer is twenty calls.
Queries, keys and values are one product where their weights are small, and so are gate and up; rotary tables are computed once; heads that share keys
are read as further queries of one head, so that keys are not copied. `trial` compares the scores with the library's before the first rollout.

Covered: FAMILIES on a CPU, any float type, rotary embeddings that do not depend on the length, layers that see everything. `uncovered` says what
stands against it. Left out: prompts (`passes`), adapters, quantised layers, training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import DynamicCache

from rftcli.engines.linears import Products
from rftcli.engines.rows import Batch

STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose table is one and the same for any length."""


def uncovered(module: nn.Module, device: torch.device) -> str | None:
    """Why the model's decode step has to be the library's own forward; None: it need not."""
    kind = type(module)
    if device.type != "cpu":
        return "the own decode step is for CPUs"
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        return f"the own decode step does not know {kind.__name__}"
    config: Any = module.config
    if getattr(config, "sliding_window", None) is not None:
        return "layers see a window of the last tokens"
    if config.rope_parameters["rope_type"] not in STATIC_ROTARY or config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return f"the rotary embedding is another one ({config.rope_parameters})"
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            return f"`{name}` has hooks"
        if name.endswith(("_proj", "lm_head")) and type(part) is not nn.Linear:
            return f"`{name}` is no plain linear layer, but {type(part).__module__}.{type(part).__name__}"
    return None


class Decoder:
    """The model's step with the weights of one moment; `positions`: the most that a row gets."""

    def __init__(self, module: Any, products: Products, positions: int) -> None:
        model, head_dim = module.model, module.model.layers[0].self_attn.head_dim
        self._words = model.embed_tokens.weight.detach()  # (V, H)
        cos, sin = model.rotary_emb(self._words, torch.arange(positions)[None])
        self._turns = torch.stack([cos[0], _signed(sin[0], head_dim // 2)], 1)  # (positions, 2, D)
        self._layers = [_Layer(layer, products) for layer in model.layers[: module.config.num_hidden_layers]]
        self.shared, self.dim, self.dtype = self._layers[0].shared, head_dim, self._words.dtype
        """(key heads, queries of each); numbers of a head."""
        self._norm, self._head = _norm(model.norm), products.joined(module.lm_head)

    def __call__(self, ids: Tensor, batch: Batch) -> Tensor:
        """(R, V) scores after the tokens `ids` (R,), which get the newest place of the batch's mask and cache."""
        cache: DynamicCache = batch.cache
        cos, sin = self._turns[batch.positions].unbind(2)  # (R, 1, D)
        unseen = torch.zeros(batch.mask.shape, dtype=cos.dtype).masked_fill_(batch.mask == 0, -torch.inf)
        unseen = unseen[:, None, None].expand(-1, *self.shared, -1).flatten(0, 1)  # (R x key heads, queries of each, S)
        hidden = embedding(ids, self._words)  # (R, H)
        for layer, states in zip(self._layers, cache.layers, strict=True):
            hidden = layer(hidden, cos, sin, unseen, states)
        return self._head(self._norm(hidden))


class _Layer:
    def __init__(self, layer: Any, products: Products) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._dim = attention.head_dim
        self._heads, self._key_heads = attention.q_proj.out_features // self._dim, attention.k_proj.out_features // self._dim
        self.shared = self._key_heads, self._heads // self._key_heads
        self._scale = attention.scaling
        self._before, self._between = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self._qkv = products.joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads_norm = _heads_norm(attention, self._heads, self._key_heads)
        self._out = products.joined(attention.o_proj)
        self._gate_up, self._act, self._down = products.joined(mlp.gate_proj, mlp.up_proj), mlp.act_fn, products.joined(mlp.down_proj)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, unseen: Tensor, states: Any) -> Tensor:
        rows = len(hidden)
        heads = self._qkv(self._before(hidden)).view(rows, -1, self._dim)  # (R, queries + keys + values, D)
        turned, values = heads.split((self._heads + self._key_heads, self._key_heads), 1)
        if self._heads_norm is not None:
            turned = self._heads_norm(turned)
        turned = (turned * cos).add_(turned.roll(self._dim // 2, -1).mul_(sin))
        queries, keys = turned.split((self._heads, self._key_heads), 1)
        keys, values = states.update(keys.unsqueeze(2), values.unsqueeze(2))  # (R, key heads, S, D)
        queries = queries.reshape(-1, self.shared[1], self._dim)  # heads of one key head stand together
        found = attended(queries, keys.flatten(0, 1), values.flatten(0, 1), unseen, self._scale)
        hidden = self._out(found.reshape(rows, -1)).add_(hidden)
        gate, up = self._gate_up(self._between(hidden)).chunk(2, -1)
        return self._down(self._act(gate).mul_(up)).add_(hidden)


def attended(queries: Tensor, keys: Tensor, values: Tensor, unseen: Tensor, scale: float) -> Tensor:
    """(N, G, D) of queries (N, G, D), keys and values (N, S, D); `unseen` (N, G, S) is added to the scores. In float32 three calls are faster than
    the fused one, which calls MKL for each head; in shorter types that one keeps its sums in float32."""
    if queries.dtype not in (torch.float32, torch.float64):
        return scaled_dot_product_attention(queries[:, None], keys[:, None], values[:, None], attn_mask=unseen[:, None], scale=scale)
    return torch.bmm(torch.baddbmm(unseen, queries, keys.transpose(1, 2), alpha=scale).softmax(-1), values)


def _norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """Root mean square norm over the last dimension (Zhang and Sennrich, 1910.07467)."""
    weight, eps = norm.weight.detach(), torch.tensor(norm.variance_epsilon)

    def in_float32(hidden: Tensor) -> Tensor:
        size = vector_norm(hidden, dim=-1, keepdim=True)
        return (hidden * torch.addcmul(eps, size, size, value=1.0 / len(weight)).rsqrt_()).mul_(weight)

    return in_float32 if weight.dtype == torch.float32 else lambda hidden: weight * _normed(hidden, norm.variance_epsilon)


def _normed(hidden: Tensor, eps: float) -> Tensor:
    """Without the weight, in float32 and rounded before it, as the library's."""
    exact = hidden.float()
    return (exact * (exact.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(hidden.dtype)


def _heads_norm(attention: nn.Module, heads: int, key_heads: int) -> Callable[[Tensor], Tensor] | None:
    """Of queries and keys (R, heads of both, D) at once, where a family norms them."""
    parts: dict[str, Any] = dict(attention.named_children())
    if "q_norm" not in parts:
        return None
    weights = torch.cat([parts["q_norm"].weight.detach().expand(heads, -1), parts["k_norm"].weight.detach().expand(key_heads, -1)])
    return lambda turned: weights * _normed(turned, parts["q_norm"].variance_epsilon)


def _signed(sin: Tensor, half: int) -> Tensor:
    """A vector's halves change places and the second turns negative: here the table has the sign, and rolling does the rest."""
    return torch.cat([-sin[:, :half], sin[:, half:]], -1)


# To add one: the class of a model whose layers are norm, attention with rotary embedding, norm, gated feed-forward, and nothing else; with a row in
# `tests/engines/test_own_step.py`, which compares it with the library's forward.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
