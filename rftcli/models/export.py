"""Writing a policy so that `from_pretrained` loads it and it stops where training stopped.

What it leaves out: gathering sharded weights (they are given), trainer state, and making the directory appear at once (the checkpoint room's task).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rftcli.models.load import pad_id

_SAMPLING_FLAGS = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Flags that transformers refuses to save beside `do_sample: false`."""


def export_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state_dict: Mapping[str, Tensor] | None,
    directory: Path,
    *,
    eos_ids: Sequence[int],
    card: Mapping[str, str] | None = None,
    plain: Mapping[str, Tensor] | None = None,
) -> None:
    """Weights (safetensors, in the loaded policy's dtype), configuration, generation configuration, tokenizer with chat template, and a model card.

    `state_dict` holds full tensors by the model's own names (None: the model's weights as they are). `eos_ids` are all ids that ended a completion
    in training; the written generation configuration stops at them and at those it named before. `card` is shown as a table in README.md.
    `plain`: for a model whose layers an adapter wraps, name without adapter -> the tensor in its place; weights are then written as those of a model
    of the same class without adapter, unpacked if they are quantised.
    """
    hf_writer(model, tokenizer, state_dict, directory, eos_ids=eos_ids, card=card, plain=plain)()


def hf_writer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state_dict: Mapping[str, Tensor] | None,
    directory: Path,
    *,
    eos_ids: Sequence[int],
    card: Mapping[str, str] | None = None,
    plain: Mapping[str, Tensor] | None = None,
) -> Callable[[], None]:
    """What `export_hf` does, up to writing: a thread may write while the model is trained. All that is made here, because making a model sets torch's
    default number type for the whole process."""
    generation = stopping_generation_config(model.generation_config, eos_ids, pad_id(tokenizer))
    if plain is not None:
        assert state_dict is not None, "an adapted model has no weights of its own to write"
        whole = _as_loaded(plain, state_dict, model.dtype)
        model, state_dict = _unwrapped(model, whole), None
    weights = None if state_dict is None else _of(model, state_dict)
    shell = copy.copy(model)  # save_pretrained writes the model's own configurations, and changes them
    shell.config, shell.generation_config = copy.deepcopy(model.config), generation

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        shell.save_pretrained(directory, state_dict=weights)
        tokenizer.save_pretrained(directory)
        (directory / "README.md").write_text(_model_card(card or {}), encoding="utf-8")

    return write


def stopping_generation_config(base: GenerationConfig | None, eos_ids: Sequence[int], pad: int) -> GenerationConfig:
    """A copy of `base` that also stops at `eos_ids`. Sampling flags of a configuration that does not sample only make saving fail: they go."""
    config = GenerationConfig() if base is None else copy.deepcopy(base)
    named = config.eos_token_id
    known = [] if named is None else [named] if isinstance(named, int) else list(named)
    stops = sorted({*known, *eos_ids})
    config.eos_token_id = None if not stops else stops[0] if len(stops) == 1 else stops
    if config.pad_token_id is None:
        config.pad_token_id = pad
    if not config.do_sample:
        plain = GenerationConfig()
        for name in _SAMPLING_FLAGS:
            setattr(config, name, getattr(plain, name, None))
    return config


def _of(model: PreTrainedModel, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return _as_loaded(model.state_dict(keep_vars=True), state_dict, model.dtype)


def _as_loaded(own: Mapping[str, Tensor], state_dict: Mapping[str, Tensor], default: torch.dtype) -> dict[str, Tensor]:
    """Tensors in the dtypes of the loaded policy, `own` (`default` where it has few bits); names that are one weight in the model share one tensor
    again, and one of two may be missing."""
    unknown = sorted(set(state_dict) - set(own))
    assert not unknown, f"weights that are none of the model's: {unknown[:3]}"
    written: dict[int, Tensor] = {}
    for name, tensor in state_dict.items():
        dtype = own[name].dtype if own[name].dtype.is_floating_point else default
        written.setdefault(id(own[name]), tensor.detach().to(device="cpu", dtype=dtype).contiguous())
    lacking = [name for name, tensor in own.items() if isinstance(tensor, nn.Parameter) and id(tensor) not in written]
    assert not lacking, f"weights that are missing: {lacking[:3]}"
    return {name: written.get(id(tensor), tensor.detach()) for name, tensor in own.items()}  # buffers that were not given are the model's


def _unwrapped(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model of the same class without adapter around the weights, which are not copied."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        bare = type(model)._from_config(config, dtype=model.dtype)
    needed = bare.state_dict()
    bare.load_state_dict({name: tensor for name, tensor in weights.items() if name in needed}, strict=True, assign=True)
    bare.tie_weights()
    bare.generation_config = model.generation_config
    return bare


def _model_card(card: Mapping[str, str]) -> str:
    lines = [
        "---",
        "library_name: transformers",
        "tags: [reinforcement-fine-tuning, rft]",
        "---",
        "",
        "# A policy trained with `rft`",
        "",
        "Load it with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.",
    ]
    if card:
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in card.items())]
    return "\n".join(lines) + "\n"
