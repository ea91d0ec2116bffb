"""Attention over packed rows without padding and without a mask over the whole pack: every sequence attends to itself alone.

Transformers attention implementations that take the borders of the sequences from the arguments `cu_seq_lens_q` and `max_length_q`
which transformers hands from a model's call down to its attention. Calls without borders (an engine with its cache, a padded batch, a prompt alone)
go through transformers' scaled dot-product attention with their mask.

Three kernels, one meaning: torch's variable-length attention (CUDA, half precision), flash-attn, and torch's scaled dot-product
attention sequence by sequence, which runs everywhere. A row in which completions share prompts comes as a whole, as `packed_row`; models whose
attention is not one of these get a mask for it. What it leaves out: soft caps, sinks and position biases, which are refused by name.
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
from rftcli.models.flash import CpuFlash, Kernel, PackedAttention, Spans, TorchFlash
from rftcli.models.flash_packages import FLASH
from rftcli.models.packed_rows import PackedRow, block_mask, read_row

IMPLEMENTATIONS = {"varlen": "rft_varlen", "flash_2": "rft_flash_2", "flash_3": "rft_flash_3"}
"""Kind in a recipe -> name under which transformers knows it. Every other kind has its own name there."""

MOST_HEAD_DIM = 256
"""Widest head of the flash kernels."""
OLDEST_GENERATION = 8
"""First number of the compute capability of the oldest cards that they run on (Ampere)."""

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


def borders(position_ids: Tensor, device: torch.device | None = None) -> dict[str, Any]:
    """Arguments for the model's call on `device`, from the positions of a packed row (1, S); with them no mask is made.

    `attention_mask` is an empty one of four dimensions: transformers takes such a mask as already made and passes it on.
    """
    row = read_row(position_ids, device)
    no_mask = {"attention_mask": torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=row.own.queries.device)}
    if row.shared is not None:
        return {"packed_row": row, **no_mask}
    ends, longest = row.own.queries, row.own.most_queries
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest, **no_mask}


def model_inputs(model: nn.Module, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
    """Arguments of a pass without cache over padded rows, or over packed ones (attention_mask None).

    Rows are padded behind their tokens, which no token looks back from: nothing has to be masked, and attention that is causal and no more runs in
    faster kernels. What stands at the padding is read by nobody.
    """
    device = input_ids.device
    if attention_mask is not None:
        return {"input_ids": input_ids, "attention_mask": None, "position_ids": None, "use_cache": False}
    places = position_ids.to(device, non_blocking=True)
    inputs = {"input_ids": input_ids, "attention_mask": None, "position_ids": places, "use_cache": False}
    return inputs | (borders(position_ids, device) if packs(model) else _mask(model, position_ids, device))


def _mask(model: nn.Module, position_ids: Tensor, device: torch.device) -> dict[str, Any]:
    """Of a packed row, where transformers' own attention runs; without shared prompts transformers reads the borders itself."""
    row = read_row(position_ids, device)
    if row.shared is None:
        return {}
    _check_window(model, row)
    sees = block_mask(row, device)
    if model.config.get_text_config()._attn_implementation == "sdpa":
        return {"attention_mask": sees}
    dtype = next(model.parameters()).dtype  # eager attention adds its mask to the scores
    return {"attention_mask": torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, torch.finfo(dtype).min)}


def _check_window(model: nn.Module, row: PackedRow) -> None:
    """A mask of one's own takes the place of a model's window."""
    config = model.config.get_text_config()
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    used = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    if window is not None and used and window < row.longest:
        raise UsageError(f"the sliding window of {type(model).__name__} does not go with shared prompts", hint="set batch.share_prompts: false")


def packs(model: nn.Module) -> bool:
    """Whether the model's attention takes `borders`."""
    return model.config.get_text_config()._attn_implementation in IMPLEMENTATIONS.values()


def _attention(kernel: Callable[..., Tensor], shares: Callable[..., Tensor] | None = None) -> Callable[..., tuple[Tensor, None]]:
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
        packed_row: PackedRow | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """query (1, H, S, D), key and value (1, K, S, D) -> (1, S, H, D)."""
        if packed_row is None and (cu_seq_lens_q is None or max_length_q is None):
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
        if packed_row is not None:
            if shares is None or (sliding_window is not None and sliding_window < packed_row.longest):
                what = "this kind of attention" if shares is None else f"the sliding window of {type(module).__name__}"
                raise UsageError(f"{what} does not go with shared prompts", hint="set batch.share_prompts: false")
            return shares(query, key, value, packed_row, scaling), None
        assert cu_seq_lens_q is not None and max_length_q is not None
        ends = cu_seq_lens_q.to(query.device)
        out = kernel(module, query, key, value, ends=ends, longest=max_length_q, scaling=scaling, window=sliding_window)
        return out, None

    return attention


def _varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, ends: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    within = None if window is None or window >= longest else window
    kernel = _fitting(query, value)
    if kernel is None or (within is not None and not query.is_cuda):
        return _one_by_one(module, query, key, value, ends=ends, longest=longest, scaling=scaling, window=window)
    if not torch.compiler.is_compiling():
        own = Spans(queries=ends, keys=ends, most_queries=longest, most_keys=longest, causal=True, window=within)
        return PackedAttention.apply(*_flat(query, key, value), own, None, scaling, kernel)[None]
    if not query.is_cuda:
        return _one_by_one(module, query, key, value, ends=ends, longest=longest, scaling=scaling, window=window)
    return _traced(module, query, key, value, ends=ends, longest=longest, scaling=scaling, window=window)


def _flat(*tensors: Tensor) -> list[Tensor]:
    """(1, heads, S, D) -> (S, heads, D), which is how projections leave them in memory."""
    return [tensor[0].transpose(0, 1).contiguous() for tensor in tensors]


def _varlen_shared(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scaling: float | None) -> Tensor:
    kernel = _fitting(query, value)
    if kernel is None:
        return _one_after_another(query, key, value, row, scaling)
    return PackedAttention.apply(*_flat(query, key, value), row.own, row.shared, scaling, kernel)[None]


def _one_after_another(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scaling: float | None) -> Tensor:
    """Every completion with the keys of its prompt in front of its own: in every number type, for heads of any widths."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    parts = []
    for family in row.families:
        end = family.start + family.prompt
        prompt = slice(family.start, end)
        if family.prompt:
            parts.append(scaled_dot_product_attention(query[:, :, prompt], key[:, :, prompt], value[:, :, prompt], is_causal=True, scale=scaling))
        for length in family.parts:
            own = slice(end, end + length)
            keys, values = (torch.cat([tensor[:, :, prompt], tensor[:, :, own]], 2) for tensor in (key, value))
            mask = torch.ones(length, family.prompt + length, dtype=torch.bool, device=query.device).tril(family.prompt) if family.prompt else None
            parts.append(scaled_dot_product_attention(query[:, :, own], keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling))
            end += length
    return torch.cat(parts, 2).transpose(1, 2)


def _traced(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, ends: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """The same kernel as an operator that torch.compile knows."""
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
    return varlen_attn(*_flat(query, key, value), ends, ends, longest, longest, **options)[None]


@cache
def _arguments() -> frozenset[str]:
    """What torch's kernel takes; it grew over its versions."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(signature(varlen_attn).parameters)


def _fitting(query: Tensor, value: Tensor) -> Kernel | None:
    """None: no kernel takes the heads or the number type."""
    width = query.shape[-1]
    if width != value.shape[-1]:
        return None
    if query.device.type == "cpu":
        return CpuFlash()
    half = query.dtype in (torch.bfloat16, torch.float16)
    fits = query.is_cuda and half and width % 8 == 0 and width <= MOST_HEAD_DIM
    return TorchFlash() if fits and _generation(query.device.index) >= OLDEST_GENERATION else None


@cache
def _generation(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


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
        flat = _flat(query, key, value)  # fewer heads of keys are known to it
        sides = (-1, -1) if window is None else (window - 1, 0)
        out = run(*flat, ends, ends, longest, longest, softmax_scale=scaling, causal=True, window_size=sides)
        return (out[0] if isinstance(out, tuple) else out)[None]

    return kernel


# How to add one: a function (module, query, key, value, *, ends, longest, scaling, window) -> (1, S, H, D), its name here and in IMPLEMENTATIONS.
KERNELS: dict[str, Callable[..., Tensor]] = {"varlen": _varlen, **{kind: _flash(package) for kind, package in FLASH.items()}}
SHARING: dict[str, Callable[..., Tensor]] = {"varlen": _varlen_shared}
"""Those that know shared prompts: (query, key, value, row, scaling) -> (1, S, H, D)."""

for _kind, _kernel in KERNELS.items():
    AttentionInterface.register(IMPLEMENTATIONS[_kind], _attention(_kernel, SHARING.get(_kind)))
    AttentionMaskInterface.register(IMPLEMENTATIONS[_kind], sdpa_mask)
