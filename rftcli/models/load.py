"""Loading a tokenizer and a causal language model from a directory, a GGUF file or a hub id.

What it leaves out: facts about a model without loading it (the probe room), adapters (`lora`), and a larger vocabulary (`vocabulary`). GGUF blocks
are unpacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rftcli.errors import MachineError, UsageError
from rftcli.models import kernels as fused
from rftcli.models.attention import implementation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_FIXED_OPTIONS = frozenset({
    "config", "dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "gguf_file", "quantization_config", "revision", "device_map",
})  # fmt: skip
"""Arguments of `from_pretrained` that this file decides."""

_HUB_OPTIONS = frozenset({"token", "cache_dir", "subfolder", "local_files_only", "force_download", "proxies"})
"""Arguments that say where files come from: needed for the configuration and again for the weights."""

_DROPOUT_NAME = re.compile(r"dropout|pdrop|layerdrop|jitter")
"""Names of probabilities in configurations and modules: attention_dropout, resid_pdrop, summary_first_dropout, layerdrop, router_jitter_noise, ..."""
_ALWAYS_OFF = re.compile(r"layerdrop|jitter")
"""Those that dropout does not stand for: they leave out layers, or add noise to a router and what goes into it."""


def load_tokenizer(
    path: str, *, trust_remote_code: bool = False, revision: str | None = None, options: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Without a pad token the end token pads; padding is always masked, so nothing is learned from it.
    `revision` is of a hub id; `options` go to `from_pretrained`.

    Raises UsageError if there is none, MachineError if a package it needs is missing.
    """
    with _readable_errors(path):
        tokenizer = AutoTokenizer.from_pretrained(**_source(path, revision), trust_remote_code=trust_remote_code, **(options or {}))
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id for masked positions; 0 for a tokenizer with neither pad nor end token, because any valid id will do there."""
    return 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def load_causal_lm(
    path: str,
    *,
    dtype: str,
    attention: str,
    dropout: float,
    options: Mapping[str, Any],
    trust_remote_code: bool,
    device: torch.device | str,
    revision: str | None = None,
    quantised: Any = None,
    kernels: str = "none",
) -> PreTrainedModel:
    """The model, in eval mode, on `device`. `dtype` is float32 or bfloat16, `attention` a kind of the recipe, `options` go to `from_pretrained`
    (a key of the configuration changes it). `revision` is of a hub id. `quantised`: a `BitsAndBytesConfig`; weights go to the device in few bits.
    `kernels`: none or liger, whose families are known before weights are read.

    `dropout` is set everywhere: 0.0 turns off what the configuration or a module brought along. Layer drop is always off: it would make two
    forward passes of one policy different models. Raises UsageError for what is no model, or for an option that is fixed elsewhere, and MachineError
    for a missing package.
    """
    fixed = sorted(_FIXED_OPTIONS & set(options))
    if fixed:
        hint = "dtype, attention, dropout and trust_remote_code are keys of models.policy"
        raise UsageError(f"models.policy.options: `{fixed[0]}` is set elsewhere", hint=hint)
    source = _source(path, revision)
    few_bits = {} if quantised is None else {"quantization_config": quantised, "device_map": {"": torch.device(device)}}
    with _readable_errors(path):
        hub = {name: value for name, value in options.items() if name in _HUB_OPTIONS}
        changes = {name: value for name, value in options.items() if name not in _HUB_OPTIONS}
        config, rest = AutoConfig.from_pretrained(**source, **hub, **changes, trust_remote_code=trust_remote_code, return_unused_kwargs=True)
        if kernels == "liger":
            fused.switches(config)
        _set_config_dropout(config, dropout)
        model = AutoModelForCausalLM.from_pretrained(
            **source,
            **_unpacked(source),
            **few_bits,
            **hub,
            **{name: rest[name] for name in changes if name in rest},
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=implementation(attention),
            trust_remote_code=trust_remote_code,
        )
    _set_module_dropout(model, dropout)
    if kernels == "liger":
        fused.apply(model)
    if quantised is None:
        return model.to(device)
    _keep_packing(model)
    return model.eval()


def eos_ids(config: PreTrainedConfig, generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end a completion: of the configuration, of the generation configuration (one id, a list, or none; it may be None) and the
    tokenizer's own, sorted. Chat models often end turns with another token than the one their base model was configured with."""
    named = [config.get_text_config().eos_token_id, None if generation_config is None else generation_config.eos_token_id, tokenizer.eos_token_id]
    found: set[int] = set()
    for entry in named:
        found.update(() if entry is None else [entry] if isinstance(entry, int) else entry)
    return tuple(sorted(found))


def num_parameters(module: nn.Module) -> int:
    """Parameters, tied ones once. A parameter that DeepSpeed has partitioned counts in full (it is empty here and knows its size)."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def quantisation(*, bits: int, kind: str, nested: bool, dtype: str) -> Any:
    """The configuration of bitsandbytes for frozen weights of few bits, computed with in `dtype`. MachineError without the package."""
    try:
        import bitsandbytes  # noqa: F401 - transformers finds out much later
    except ImportError as error:
        raise MachineError("weights in few bits (`quantise`) need the package bitsandbytes", hint="pip install 'rftcli[quantise]'") from error
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested, bnb_4bit_compute_dtype=DTYPES[dtype])


def _keep_packing(model: nn.Module) -> None:
    """On CPUs with bfloat16 instructions bitsandbytes packs 4-bit weights anew at the first pass without gradients, for good; a backward pass and
    a merge then read them wrongly."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _source(path: str, revision: str | None = None) -> dict[str, Any]:
    """Arguments that name the model to `from_pretrained`."""
    local = Path(path).expanduser()
    if local.is_file() and local.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(local.parent), "gguf_file": local.name}
    if local.is_dir():
        return {"pretrained_model_name_or_path": str(local)}
    return {"pretrained_model_name_or_path": path} | ({} if revision is None else {"revision": revision})


def _unpacked(source: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF weights become plain tensors: blocks cannot be trained. Releases of transformers without a GgufConfig always unpack."""
    if "gguf_file" not in source:
        return {}
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


@contextmanager
def _readable_errors(path: str) -> Iterator[None]:
    """What the library says about a path, as an error a person can act on."""
    try:
        yield
    except ImportError as error:
        hint = "pip install 'rftcli[gguf]'" if path.endswith(".gguf") else None
        raise MachineError(f"{path} needs a package that is missing: {_first_line(error)}", hint=hint) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UsageError(f"models.policy.options: {_first_line(error)}", hint="an option is a key of config.json or of from_pretrained") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        hint = "config.json and the weights are of two models; the log lists every weight with both shapes"
        raise UsageError(f"{path} cannot be loaded: its weights have other shapes than its config.json says", hint=hint) from error
    except (OSError, ValueError) as error:
        hint = "give a directory that save_pretrained wrote, a .gguf file, or a hub id"
        if "trust_remote_code" in str(error):
            hint = "read the code that comes with the model; `models.policy.trust_remote_code: true` lets it run"
        raise UsageError(f"{path} cannot be loaded: {_first_line(error)}", hint=hint) from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value)


def _set_config_dropout(config: PreTrainedConfig, dropout: float) -> None:
    for part in _configs(config):
        _set_probabilities(part, dropout)


def _set_module_dropout(model: nn.Module, dropout: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = dropout
        _set_probabilities(module, dropout)


def _set_probabilities(owner: object, dropout: float) -> None:
    """Every number of the object whose name says dropout. A None (a head this model has not got) stays None."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _DROPOUT_NAME.search(name):
            setattr(owner, name, 0.0 if _ALWAYS_OFF.search(name) else dropout)


def special_tokens(tokenizer: Any) -> set[str]:
    """Texts of the tokens that decoding without special tokens leaves out."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return added | set(tokenizer.all_special_tokens)
