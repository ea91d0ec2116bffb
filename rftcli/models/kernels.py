"""Liger's fused Triton kernels in a loaded model: RMSNorm, SwiGLU or GeGLU, rotary embedding (liger-kernel, arXiv:2410.10989).

What it leaves out: Liger's losses and the forward passes that come with them, because the head is this project's own (`policy`); its kernels for
mixtures of experts, whose sums have no fixed order; and kernels for images.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from rftcli.errors import MachineError, UsageError
from rftcli.models.router import EXPERTS

SWITCHES = ("rms_norm", "rope", "swiglu", "geglu")
"""What is replaced, by the names that Liger's functions have for it; every other switch of theirs is off."""
ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""What a kernel computes, whatever the model had there."""
OFF = "leave `train.kernels` out"


def switches(config: PreTrainedConfig) -> dict[str, bool]:
    """What `apply` hands to Liger for a model of this configuration: each switch that its function for the family has, on or off.

    Raises MachineError without the package, and UsageError for a family that Liger has no such kernels for, or an activation that they do not
    compute.
    """
    function = _functions().get(config.model_type)
    found = {} if function is None else signature(function).parameters
    # a switch that is off by default is one that does not work for the family
    chosen = {name: name in SWITCHES and parameter.default is True for name, parameter in found.items() if isinstance(parameter.default, bool)}
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in EXPERTS):
        chosen = {name: on and name not in ACTIVATIONS for name, on in chosen.items()}
    if not any(chosen.values()):
        raise UsageError(f"train.kernels: liger-kernel has no kernels for models of the family `{config.model_type}`", hint=OFF)
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    for name, computed in ACTIVATIONS.items():
        if chosen.get(name) and activation not in computed:
            raise UsageError(f"train.kernels: liger-kernel computes {computed[0]}, and this model's activation is {activation}", hint=OFF)
    return chosen


def apply(model: PreTrainedModel) -> None:
    """Replace the forward passes of the model's own norms and gated layers, and the rotary embedding of every model of its family in this process.
    Parameters and their names stay.

    Before adapters and engines wrap the model. Raises as `switches`, and UsageError for a model whose code is not the library's own.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    chosen = switches(model.config)
    if not type(model).__module__.startswith("transformers.models."):
        raise UsageError(f"train.kernels: {type(model).__name__} is code that came with the model, which liger-kernel does not know", hint=OFF)
    try:
        with _classes_stay(model):
            _apply_liger_kernel_to_instance(model, **chosen)
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"train.kernels: liger-kernel cannot replace anything in a {type(model).__name__}: {error}", hint=OFF) from error


@contextmanager
def _classes_stay(model: PreTrainedModel) -> Iterator[None]:
    """Liger exchanges the family's classes beside the instance's methods. Its classes lack what some models have (the biases of gated layers), which
    a model that is loaded later would lose without a word."""
    modules = [sys.modules[name] for name in {type(part).__module__ for part in model.modules()}]
    classes = [{name: value for name, value in vars(module).items() if isinstance(value, type)} for module in modules]
    try:
        yield
    finally:
        for module, before in zip(modules, classes, strict=True):
            vars(module).update(before)


def _functions() -> dict[str, Any]:
    """Liger's function for each family, by `model_type`."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise MachineError(f"train.kernels liger needs the package `liger-kernel`: {error}", hint="pip install 'rftcli[liger]'") from error
    return MODEL_TYPE_TO_APPLY_LIGER_FN
