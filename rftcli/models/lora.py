"""A low-rank adapter inside a causal language model, through peft: attached in place, switched off for the reference, merged for export.

The layers of the model itself are wrapped, so whatever used the model goes on using it: the trainer's policy module and the engine that shares it
both see the adapted model. Adapter weights are float32 whatever the base is; `lora_products` rounds them where they are used.

What it leaves out: gathering sharded weights (a caller lends a context in which they are whole), and the optimizer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rftcli.errors import MachineError, UsageError
from rftcli.models.lora_products import multiply_in

TRAINED = "default"
"""peft's name of the adapter that is trained."""
COPY = "reference"
"""Name of the frozen copy of an adapter that was gone on from."""
_WRAPPED = ".base_layer"
_PEFT_PREFIX = "base_model.model."

Present = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]
"""A context in which the `data` of parameters is whole."""


def attach(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: str | Sequence[str],
    save_also: Sequence[str],
    options: Mapping[str, Any],
    start_from: str | None,
    base_name: str,
    copy_for_reference: bool = False,
) -> Adapter:
    """Wrap the model's layers in place. `targets`: "all-linear", a regular expression, or name endings. With `start_from` the saved adapter decides
    everything but the dropout; `copy_for_reference` then keeps a second, frozen copy of it.

    UsageError for what peft refuses, and for adapting a head that is tied to the embedding; MachineError without peft.
    """
    try:
        import peft
    except ImportError as error:
        raise MachineError("models.policy.lora needs the package peft", hint="pip install 'rftcli[lora]'") from error
    if getattr(model, "is_quantized", False):
        # norms stay in the model's own type: they are frozen, and float32 ones would change what is computed
        model.requires_grad_(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft corrects it for layers of GPT-2's kind
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # refused below, with the way out
            if start_from is None:
                config = peft.LoraConfig(
                    r=rank,
                    lora_alpha=alpha,
                    lora_dropout=dropout,
                    target_modules=targets if isinstance(targets, str) else list(targets),
                    modules_to_save=list(save_also) or None,
                    task_type="CAUSAL_LM",
                    **options,
                )
                wrapped = peft.get_peft_model(model, config)
            else:
                config = peft.PeftConfig.from_pretrained(start_from)
                if not isinstance(config, peft.LoraConfig):
                    raise UsageError(f"models.policy.lora.start_from: {start_from} is a {config.peft_type} adapter, not LoRA")
                config.lora_dropout, config.inference_mode = dropout, False
                wrapped = peft.PeftModel.from_pretrained(model, start_from, config=config, is_trainable=True)
                if copy_for_reference:
                    wrapped.load_adapter(start_from, COPY, is_trainable=False)
                    wrapped.set_adapter(TRAINED)
    except (ValueError, OSError, RuntimeError) as error:
        text = str(error).partition("\n")[0]
        raise UsageError(f"models.policy.lora: {text}", hint="module names are those of the model: `targets`, `save_also`") from error
    for part in wrapped.peft_config.values():
        part.base_model_name_or_path = base_name
    _refuse_tied_head(model)
    _saved_modules_in_float32(model)
    if start_from is not None:  # once more: what was loaded before had the base's type
        state = peft.load_peft_weights(start_from, device="cpu")
        for name in wrapped.peft_config:
            peft.set_peft_model_state_dict(wrapped, state, adapter_name=name)
    multiply_in(model, model.dtype)
    return Adapter(wrapped, model, has_copy=copy_for_reference)


class Adapter:
    """The adapter of one model. `peft` is peft's handle, outside the module tree; `model` is the model that was wrapped in place."""

    def __init__(self, wrapped: Any, model: PreTrainedModel, *, has_copy: bool) -> None:
        self.peft = wrapped
        self.model = model
        self.has_copy = has_copy

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """The model as it was before training: the frozen copy of the adapter if there is one, else no adapter."""
        tuner = self.peft.base_model
        if self.has_copy:
            tuner.set_adapter(COPY, inference_mode=True)
        else:
            tuner.disable_adapter_layers()
        try:
            yield
        finally:
            if self.has_copy:
                tuner.set_adapter(TRAINED)
            else:
                tuner.enable_adapter_layers()

    def merged(self, present: Present) -> Iterator[tuple[str, Tensor]]:
        """(name in the model without adapter, whole tensor) with the adapter merged in, one at a time; sums are taken in float32. The model itself
        stays as it is, bit for bit. A consumer copies what it keeps."""
        yield from self._layers(present, _merged_layer)

    def base(self, present: Present) -> Iterator[tuple[str, Tensor]]:
        """As `merged`, of the model below the adapter."""
        yield from self._layers(present, _base_layer)

    def _layers(self, present: Present, adapted: Callable[[str, nn.Module, Present], Iterator[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
        from peft.utils import ModulesToSaveWrapper

        done: set[int] = set()
        seen: set[int] = set()  # tied weights come once, under their first name
        for prefix, module in self.model.named_modules():
            if id(module) in done:
                continue
            if isinstance(module, ModulesToSaveWrapper):
                done |= {id(part) for part in module.modules()}
                yield from _whole(prefix, module.modules_to_save[TRAINED], present, seen)
            elif _is_lora(module):
                done |= {id(part) for part in module.modules()}
                yield from adapted(prefix, module, present)
            else:
                yield from _whole(prefix, module, present, seen, recurse=False)

    def plain(self) -> dict[str, Tensor]:
        """Name in the model without adapter -> the tensor that has its place now: for names and number types, not for values."""
        from peft.utils import ModulesToSaveWrapper

        found: dict[str, Tensor] = {}
        inside = {prefix for prefix, module in self.model.named_modules() if isinstance(module, ModulesToSaveWrapper)}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if ".original_module." in name and any(name.startswith(f"{prefix}.original_module.") for prefix in inside):
                found[name.replace(".original_module.", ".")] = tensor
            elif "lora_" not in name and ".modules_to_save." not in name:
                found[name.replace(_WRAPPED, "")] = tensor
        return found

    def save(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the adapter so that `PeftModel.from_pretrained` loads it. `weights`: whole trained tensors by the model's own names."""
        state = {_PEFT_PREFIX + name: tensor for name, tensor in weights.items()}
        self.peft.save_pretrained(directory, state_dict=state, selected_adapters=[TRAINED], save_embedding_layers=False)
        path = directory / "adapter_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | {"inference_mode": True}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class AdaptedWeights:
    """`protocols.AdaptedWeights` of an adapter; `present` makes sharded parameters whole."""

    def __init__(self, adapter: Adapter, present: Present) -> None:
        self._adapter, self._present = adapter, present

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._adapter.merged(self._present)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return self._adapter.base(self._present)

    def save_adapter(self, directory: Path) -> None:
        own = {name: parameter for name, parameter in self._adapter.model.named_parameters() if f".{TRAINED}" in name}
        with self._present(list(own.values())):  # it is small, so all of it at once
            self._adapter.save(directory, {name: parameter.data.detach() for name, parameter in own.items()})


def _is_lora(module: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer)


def _whole(prefix: str, module: nn.Module, present: Present, seen: set[int], *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(recurse=recurse):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        with present([parameter]):
            yield _join(prefix, name), _floating(module, parameter)


def _merged_layer(prefix: str, layer: nn.Module, present: Present) -> Iterator[tuple[str, Tensor]]:
    """A wrapped layer, with those nested in it (several parameters of one module are wrapped one around the other)."""
    wrappers: list[Any] = [part for part in layer.modules() if _is_lora(part)]
    base = wrappers[-1].get_base_layer()
    own = dict(base.named_parameters())
    with present(list(layer.parameters())):
        if _is_quantised(base):
            for name, parameter in own.items():
                whole = _floating(base, parameter)
                yield _join(prefix, name), whole.float() + layer.get_delta_weight(TRAINED).float() if name == "weight" else whole
            return
        before = {name: parameter.data for name, parameter in own.items()}
        try:
            for parameter in own.values():
                parameter.data = parameter.data.float()
            for wrapper in reversed(wrappers):
                wrapper.merge(safe_merge=True, adapter_names=[TRAINED])  # safe: into a new tensor, so the old one is as it was
            yield from [(_join(prefix, name), parameter.data) for name, parameter in own.items()]
        finally:
            for name, parameter in own.items():
                parameter.data = before[name]
            for wrapper in wrappers:
                wrapper.merged_adapters.clear()


def _base_layer(prefix: str, layer: nn.Module, present: Present) -> Iterator[tuple[str, Tensor]]:
    """What a wrapped layer wraps."""
    wrappers: list[Any] = [part for part in layer.modules() if _is_lora(part)]
    base = wrappers[-1].get_base_layer()
    with present(list(base.parameters())):
        yield from [(_join(prefix, name), _floating(base, parameter)) for name, parameter in base.named_parameters()]


def _is_quantised(module: nn.Module) -> bool:
    return type(module).__module__.startswith("bitsandbytes.")


def _floating(module: nn.Module, parameter: nn.Parameter) -> Tensor:
    """A tensor of numbers: a weight of few bits is unpacked."""
    if parameter.dtype.is_floating_point:
        return parameter.data.detach()
    from peft.utils.integrations import dequantize_bnb_weight

    return dequantize_bnb_weight(parameter, state=getattr(module, "state", None)).detach()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _refuse_tied_head(model: PreTrainedModel) -> None:
    """Adapting or training one of two layers that share a weight: a checkpoint has one tensor for both, and merging would change the other."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if not model.config.get_text_config().tie_word_embeddings:
        return
    for what, layer in (("output head", model.get_output_embeddings()), ("embedding", model.get_input_embeddings())):
        if isinstance(layer, (BaseTunerLayer, ModulesToSaveWrapper)):
            raise UsageError(
                f"models.policy.lora: the {what} shares its weight with the {'embedding' if what == 'output head' else 'output head'} in this model, "
                "so a merged checkpoint could not hold both",
                hint="leave it out of `targets` and `save_also`",
            )


def _saved_modules_in_float32(model: PreTrainedModel) -> None:
    """Modules that are trained whole are float32 inside a model of another type: what goes in and comes out is cast."""
    from peft.utils import ModulesToSaveWrapper

    for wrapper in model.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            outside = next(wrapper.original_module.parameters()).dtype
            for module in wrapper.modules_to_save.values():
                if outside != torch.float32:
                    _cast_around(module.float(), outside)


def _cast_around(module: nn.Module, outside: torch.dtype) -> None:
    def enter(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(item.float() if isinstance(item, Tensor) and item.is_floating_point() else item for item in arguments)

    def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return output.to(outside) if isinstance(output, Tensor) else output

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
