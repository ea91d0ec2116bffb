"""Four families: a usual one, one whose scores are capped, one with experts, and one with no switch but that of its activation."""

from __future__ import annotations

import inspect
from collections import Counter
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

CALLS: Counter[str] = Counter()


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):  # type: ignore[no-untyped-def]
    CALLS["rope"] += 1
    half = q.shape[-1] // 2
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = [x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin for x in (q, k)]
    return turned[0], turned[1]


class LigerRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon, self.offset = eps, offset

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        CALLS["rms_norm"] += 1
        wide = hidden_states.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (scaled * (self.weight.float() + self.offset)).to(hidden_states.dtype)


class LigerSwiGLUMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS["swiglu"] += 1
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LigerGEGLUMLP(LigerSwiGLUMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS["geglu"] += 1
        return self.down_proj(nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class LigerExperts(nn.Module):
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("the stand-in has no kernels for experts")


def lce_forward(self: Any, *inputs: Any, **named: Any) -> Any:
    raise NotImplementedError("the stand-in has no head")


def liger_cross_entropy(*inputs: Any, **named: Any) -> Any:
    raise NotImplementedError("the stand-in has no losses")


def _bind_method_to_module(module: nn.Module, name: str, method: Any) -> None:
    module.__dict__[name] = method.__get__(module, module.__class__)


def _patch_rms_norm_module(module: nn.Module, offset: float = 0.0, eps: float = 1e-6) -> None:
    module.offset = offset
    module.variance_epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or eps
    _bind_method_to_module(module, "forward", LigerRMSNorm.forward)


def _patch(
    modeling: Any, prefix: str, gated: tuple[str, str, type], norms: tuple[str, ...], offset: float, *, rope: bool, cross_entropy: bool,
    fused_linear_cross_entropy: bool, rms_norm: bool, mlp: bool, model: Any,
) -> None:  # fmt: skip
    """`gated`: the class in the family's module, where an instance of it is in a layer, and Liger's class; `norms`: those of a layer."""
    of_class, place, liger_class = gated
    if rope:
        modeling.apply_rotary_pos_emb = liger_rotary_pos_emb
    if rms_norm:
        setattr(modeling, f"{prefix}RMSNorm", LigerRMSNorm)
    if mlp:
        setattr(modeling, of_class, liger_class)
    if cross_entropy:
        nn.functional.cross_entropy = liger_cross_entropy
    if fused_linear_cross_entropy:
        model.forward = MethodType(lce_forward, model)
    base_model = getattr(model, model.base_model_prefix, model)
    if rms_norm:
        _patch_rms_norm_module(base_model.norm, offset)
    for layer in base_model.layers:
        if mlp:
            _bind_method_to_module(layer.get_submodule(place), "forward", liger_class.forward)
        for name in norms if rms_norm else ():
            _patch_rms_norm_module(layer.get_submodule(name), offset)


BEFORE = ("input_layernorm", "post_attention_layernorm")
AROUND = (*BEFORE, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def apply_liger_kernel_to_llama(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: PreTrainedModel = None,
) -> None:
    from transformers.models.llama import modeling_llama

    _patch(modeling_llama, "Llama", ("LlamaMLP", "mlp", LigerSwiGLUMLP), BEFORE, 0.0, rope=rope, cross_entropy=cross_entropy,
           fused_linear_cross_entropy=fused_linear_cross_entropy, rms_norm=rms_norm, mlp=swiglu, model=model)  # fmt: skip


def apply_liger_kernel_to_gemma2(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    geglu: bool = True,
    model: PreTrainedModel = None,
) -> None:
    from transformers.models.gemma2 import modeling_gemma2

    _patch(modeling_gemma2, "Gemma2", ("Gemma2MLP", "mlp", LigerGEGLUMLP), AROUND, 1.0, rope=rope, cross_entropy=cross_entropy,
           fused_linear_cross_entropy=fused_linear_cross_entropy, rms_norm=rms_norm, mlp=geglu, model=model)  # fmt: skip


def apply_liger_kernel_to_mixtral(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: PreTrainedModel = None,
) -> None:
    from transformers.models.mixtral import modeling_mixtral

    _patch(modeling_mixtral, "Mixtral", ("MixtralExperts", "mlp.experts", LigerExperts), BEFORE, 0.0, rope=rope, cross_entropy=cross_entropy,
           fused_linear_cross_entropy=fused_linear_cross_entropy, rms_norm=rms_norm, mlp=swiglu, model=model)  # fmt: skip


def apply_liger_kernel_to_nemotron(
    relu_squared: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    model: PreTrainedModel = None,
    **kwargs: Any,
) -> None:
    raise NotImplementedError("the stand-in has no kernel for this family's activation")


MODEL_TYPE_TO_APPLY_LIGER_FN = {
    "gemma2": apply_liger_kernel_to_gemma2,
    "llama": apply_liger_kernel_to_llama,
    "mixtral": apply_liger_kernel_to_mixtral,
    "nemotron": apply_liger_kernel_to_nemotron,
}


def _apply_liger_kernel_to_instance(model: PreTrainedModel, **kwargs: Any) -> None:
    function = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    known = inspect.signature(function).parameters
    function(model=model, **{name: value for name, value in kwargs.items() if name in known})
