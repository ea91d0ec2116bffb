"""Attention over packed rows without padding and without a mask over the whole pack: every sequence attends to itself alone.

Transformers attention implementations that take the borders of the sequences from the arguments `cu_seq_lens_q` and `max_length_q`
which transformers hands from a model's call down to its attention. Calls without borders (an engine with its cache, a padded batch, a prompt alone)
go through transformers' scaled dot-product attention with their mask.

Three kernels, one meaning: torch's variable-length attention (CUDA, half precision), flash-attn, and torch's scaled dot-product
attention sequence by sequence, which runs everywhere. What it leaves out: soft caps, sinks and position biases, which are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rftcli.errors import MachineError, UsageError

IMPLEMENTATIONS = {"varlen": "rft_varlen", "flash_2": "rft_flash_2", "flash_3": "rft_flash_3"}
"""Kind in a recipe -> name under which transformers knows it. Every other kind has its own name there."""

MOST_HEAD_DIM = 256
"""Widest head of the flash kernels."""

UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments that change the scores in ways no kernel here knows."""


def implementation(attention: str) -> str:
    """What `attn_implementation` is called for a kind of a recipe. MachineError where a kernel's package is missing."""
    if attention in FLASH:
        package = FLASH[attention]
        try:
            import_module(package)
        except ImportError as error:
            hint = "use models.policy.attention: varlen, which needs no package"
            raise MachineError(f"models.policy.attention: {attention} needs the package `{package}`", hint=hint) from error
    return IMPLEMENTATIONS.get(attention, attention)


def borders(position_ids: Tensor) -> dict[str, Any]:
    """Arguments for the model's call, from positions (1, S) that restart at 0 at each sequence; with them no mask is made.

    `attention_mask` is an empty one of four dimensions: transformers takes such a mask as already made and passes it on.
    """
    assert position_ids.shape[0] == 1, f"packed rows are one row, not {position_ids.shape[0]}"
    flat = position_ids[0]
    starts = (flat == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_full((1,), flat.numel())]).to(torch.int32)  # (sequences + 1,)
    longest = int(flat.max()) + 1
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {**lengths, "attention_mask": flat.new_zeros((1, 1, 1, 1), dtype=torch.bool)}


def model_inputs(model: nn.Module, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
    """Arguments of a pass without cache over padded rows, or over packed ones (attention_mask None)."""
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
    return inputs | borders(position_ids) if attention_mask is None and packs(model) else inputs


def packs(model: nn.Module) -> bool:
    """Whether the model's attention takes `borders`."""
    return model.config.get_text_config()._attn_implementation in IMPLEMENTATIONS.values()


def _attention(kernel: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """query (1, H, S, D), key and value (1, K, S, D) -> (1, S, H, D)."""
        if cu_seq_lens_q is None or max_length_q is None:
            if attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:
                name = type(module).__name__
                hint = "use models.policy.attention: sdpa"
                raise UsageError(f"{name} does not pass the borders of packed rows on to its attention", hint=hint)
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)
        for name in UNKNOWN:
            if others.get(name) is not None:
                raise UsageError(f"{type(module).__name__} needs `{name}`, which packed attention lacks", hint="use models.policy.attention: eager")
        if dropout and module.training:
            raise UsageError("packed attention has no dropout", hint="set models.policy.dropout: 0.0 or attention: sdpa")
        ends = cu_seq_lens_q.to(query.device)
        out = kernel(module, query, key, value, ends=ends, longest=max_length_q, scaling=scaling, window=sliding_window)
        return out, None

    return attention


def _varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, ends: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    if not _fits_flash(query, value):
        return _one_by_one(module, query, key, value, ends=ends, longest=longest, scaling=scaling, window=window)
    from torch.nn.attention.varlen import varlen_attn

    known = _arguments()
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in known:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None or window >= longest:
        options["is_causal"] = True
    else:  # an older torch, without windows
        return _one_by_one(module, query, key, value, ends=ends, longest=longest, scaling=scaling, window=window)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in known:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]  # (S, heads, D)
    return varlen_attn(*flat, ends, ends, longest, longest, **options)[None]


@cache
def _arguments() -> frozenset[str]:
    """What torch's kernel takes; it grew over its versions."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(signature(varlen_attn).parameters)


def _fits_flash(query: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[-1]
    return query.is_cuda and half and width == value.shape[-1] and width % 8 == 0 and width <= MOST_HEAD_DIM


def _one_by_one(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, ends: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    cuts = ends.tolist()
    lengths = [end - start for start, end in pairwise(cuts)]
    parts = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        mask = None if window is None or window >= q.shape[2] else _window(q.shape[2], window, q.device)
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling))
    return torch.cat(parts, 2).transpose(1, 2)


def _window(length: int, window: int, device: torch.device) -> Tensor:
    """(length, length) bool: each position sees itself and the `window` - 1 before it."""
    places = torch.arange(length, device=device)
    behind = places[:, None] - places
    return (behind >= 0) & (behind < window)


def _flash(package: str) -> Callable[..., Tensor]:
    def kernel(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, ends: Tensor, longest: int, scaling: float | None, window: int | None
    ) -> Tensor:
        run = import_module(package).flash_attn_varlen_func
        flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]  # (S, heads, D); fewer key heads are known to it
        sides = (-1, -1) if window is None else (window - 1, 0)
        out = run(*flat, ends, ends, longest, longest, softmax_scale=scaling, causal=True, window_size=sides)
        return (out[0] if isinstance(out, tuple) else out)[None]

    return kernel


FLASH = {"flash_2": "flash_attn", "flash_3": "flash_attn_interface"}
"""Kind -> package with `flash_attn_varlen_func`."""

# How to add one: a function (module, query, key, value, *, ends, longest, scaling, window) -> (1, S, H, D), its name here and in IMPLEMENTATIONS.
KERNELS: dict[str, Callable[..., Tensor]] = {"varlen": _varlen, **{kind: _flash(package) for kind, package in FLASH.items()}}

for _kind, _kernel in KERNELS.items():
    AttentionInterface.register(IMPLEMENTATIONS[_kind], _attention(_kernel))
    AttentionMaskInterface.register(IMPLEMENTATIONS[_kind], sdpa_mask)
