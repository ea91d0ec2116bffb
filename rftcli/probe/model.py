"""Facts about a model from its files, without torch: config.json, safetensors headers, GGUF metadata; a hub id through the hub's own cache.

Leaves out loading anything: a wrong path or a missing file is found here, before a rank starts.
"""

from __future__ import annotations

import json
import logging
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any

from rftcli.errors import MachineError, UsageError
from rftcli.plan.facts import ModelFacts
from rftcli.probe import cache

CACHE_FORMAT = 1
"""To be raised when a fact of GGUF files changes its meaning; another set of facts has entries of its own."""
WHAT_TO_GIVE = "give a directory, a .gguf file, a hub id `org/model`, or `builtin:quickstart`"
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def model_facts(path: str, revision: str | None = None) -> ModelFacts:
    """Facts of a directory, a GGUF file or a hub id at a revision (None: its newest). UsageError: it is none of them, or not whole. MachineError:
    the hub cannot be reached."""
    local = Path(path).expanduser()
    if local.is_file() and local.suffix == ".gguf":
        return _kept_from_gguf(local)
    if local.is_dir():
        return _from_directory(local)
    if local.exists():
        raise UsageError(f"{path} is neither a model directory nor a GGUF file", hint=WHAT_TO_GIVE)
    if path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        raise UsageError(f"{path} does not exist", hint=WHAT_TO_GIVE)
    config, commit = hub_file(path, revision, "config.json")
    return _facts(path, _read_json(config), [], revision=commit)


def tokenizer_commit(path: str) -> str | None:
    """The commit of a tokenizer with a hub id; None for a directory here. UsageError and MachineError as for a model."""
    if Path(path).expanduser().is_dir():
        return None
    return hub_file(path, None, "tokenizer_config.json")[1]


def _from_directory(directory: Path) -> ModelFacts:
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise UsageError(f"{directory} holds no config.json", hint="a model directory is what save_pretrained writes")
    headers = [_safetensors_header(file) for file in _weight_files(directory)]
    return _facts(str(directory), _read_json(config_path), headers)


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files that are loaded; other copies of the weights may lie beside them. Empty: the weights have another format."""
    index = directory / "model.safetensors.index.json"
    whole = directory / "model.safetensors"
    if whole.is_file():
        return [whole]
    if index.is_file():
        named = _read_json(index).get("weight_map", {})
        files = [directory / name for name in sorted(set(named.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UsageError(
                f"{directory} is not whole: {len(missing)} of {len(files)} files of weights are missing, the first is {missing[0]}",
                hint="was the download or the copy interrupted?",
            )
        return files
    if not any(directory.glob("*.bin")):
        raise UsageError(f"{directory} holds no weights (no model.safetensors)", hint="a model directory is what save_pretrained writes")
    return []


def hub_file(repository: str, revision: str | None, name: str) -> tuple[Path, str]:
    """(a file of a repository, the commit it is of), downloaded or from the hub's cache: the cache has one folder a commit."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are told by the error at the end
    try:
        found = Path(hf_hub_download(repository, name, revision=revision))
    except RevisionNotFoundError as error:
        raise UsageError(f"`{repository}` has no revision `{revision}`", hint="give a branch, a tag or a commit of the repository") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        if not isinstance(error, LocalEntryNotFoundError):
            raise UsageError(
                f"`{repository}` is no directory here and no model on the hub (or a private one)",
                hint="check the name, or `hf auth login`",
            ) from error
        raise _unreachable(repository) from error
    except HFValidationError as error:
        raise UsageError(f"`{repository}` is no directory here and no name of a model on the hub", hint=WHAT_TO_GIVE) from error
    except (HfHubHTTPError, OSError) as error:
        raise _unreachable(repository) from error
    return found, found.relative_to(next(parent for parent in found.parents if parent.name == "snapshots")).parts[0]


def _unreachable(repository: str) -> MachineError:
    return MachineError(
        f"`{repository}` is no directory here, and the model hub cannot be reached",
        hint=f"on a machine with internet: `hf download {repository}`; or give a directory",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} is not a model configuration")
    return data


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""How configurations of mixtures of experts call the number of their experts."""

EXPERTS_CHOSEN = ("num_experts_per_tok", "moe_topk", "num_experts_per_token")
"""The same for how many of them a position goes through."""


NOT_PLAIN = ("attn_logit_softcapping", "attn_softcap", "alibi")
"""Keys of configurations that change attention's scores."""
WITH_SINKS = ("gpt_oss",)
ATTENDING = {"full_attention", "sliding_attention"}
"""Kinds of layers in configurations that are attention over the whole sequence or a window."""
NOT_ATTENTION = (
    "attention_chunk_size", "mamba_d_state", "ssm_state_size", "state_size", "ssm_cfg", "layers_block_type", "block_types", "attn_layer_period",
    "lru_width",
)  # fmt: skip
"""Keys of configurations that have other layers, without saying so in `layer_types`."""


def _facts(path: str, config: dict[str, Any], headers: list[dict[str, Any]], *, revision: str | None = None) -> ModelFacts:
    text = config.get("text_config") or config
    parameters, dtype = _count(headers)
    architectures = config.get("architectures") or [None]
    return ModelFacts(
        path=path,
        architecture=architectures[0],
        layers=text.get("num_hidden_layers", text.get("n_layer")),
        hidden=text.get("hidden_size", text.get("n_embd")),
        vocabulary=text.get("vocab_size"),
        max_positions=text.get("max_position_embeddings", text.get("n_positions")),
        parameters=parameters or _estimate(text),
        file_dtype=dtype or config.get("dtype") or config.get("torch_dtype"),
        plain_attention=not any(text.get(name) for name in NOT_PLAIN) and text.get("model_type") not in WITH_SINKS,
        window=_window(text),
        attends_only=set(text.get("layer_types") or ()) <= ATTENDING and not any(text.get(name) for name in NOT_ATTENTION),
        rope_switch=_rope_switch(text),
        experts=next((text[name] for name in EXPERTS if text.get(name)), None),
        revision=revision,
        key_width=_key_width(text),
        query_width=_query_width(text),
        heads=text.get("num_attention_heads", text.get("n_head")),
        inner=_inner(text),
        shapes={name: tuple(entry["shape"]) for header in headers for name, entry in header.items() if name != "__metadata__"} or None,
    )


def _window(config: dict[str, Any]) -> int | None:
    """Qwen2 names a window that none of its layers uses."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    unused = "sliding_attention" not in kinds if kinds else config.get("use_sliding_window") is False
    return None if unused or not window else int(window)


def _rope_switch(config: dict[str, Any]) -> int | None:
    """Of the kinds of scaling whose frequencies depend on the longest position that transformers is given."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su", "dynamic"):
        return None
    found = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _key_width(config: dict[str, Any]) -> int | None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return None
    keys = config.get("num_key_value_heads") or heads
    return keys * (config.get("head_dim") or hidden // heads) if isinstance(keys, int) else None


def _query_width(config: dict[str, Any]) -> int | None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return None
    return heads * (config.get("head_dim") or hidden // heads)


def _inner(config: dict[str, Any]) -> int | None:
    """Of a mixture: the experts that a position goes through, together."""
    chosen = next((config[name] for name in EXPERTS_CHOSEN if config.get(name)), None)
    width = (config.get("moe_intermediate_size") if chosen else None) or config.get("intermediate_size", config.get("n_inner"))
    return width * (chosen or 1) if isinstance(width, int) else None


def _safetensors_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise UsageError(f"{path} is not a whole safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        size = path.stat().st_size
        body = file.read(length) if 8 + length <= size else b""
    try:
        header = json.loads(body)
    except ValueError as error:
        raise UsageError(f"{path} is not a whole safetensors file", hint="was the download or the copy cut short?") from error
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if ends and 8 + length + max(ends) > size:
        raise UsageError(f"{path} is cut short", hint="was the download or the copy interrupted, or is it a Git LFS pointer?")
    return header


def _count(headers: list[dict[str, Any]]) -> tuple[int | None, str | None]:
    total, dtypes = 0, {}
    for header in headers:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            count = 1
            for side in entry["shape"]:
                count *= side
            total += count
            dtypes[entry["dtype"]] = dtypes.get(entry["dtype"], 0) + count
    if not total:
        return None, None
    return total, _SAFETENSORS_DTYPES.get(max(dtypes, key=lambda key: dtypes[key]))


def _estimate(config: dict[str, Any]) -> int | None:
    """Parameters of a Llama-shaped decoder from its configuration; None if the shape is another one (experts, widths that differ by layer)."""
    names = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
    sizes = [config.get(name) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or any("experts" in name for name in config):
        return None
    layers, hidden, vocabulary, heads, inner = sizes
    head = config.get("head_dim") or hidden // heads
    keys = config.get("num_key_value_heads") or heads
    attention = hidden * head * (2 * heads + 2 * keys)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return layers * (attention + 3 * hidden * inner + 2 * hidden) + embeddings + hidden


def _kept_from_gguf(path: Path) -> ModelFacts:
    """From the cache, if the file has not changed: reading the vocabulary that its header carries takes seconds."""
    states = cache.file_states([path])
    if not cache.settled(states):
        return _from_gguf(path)
    entry = cache.entry(cache.user_cache_dir(), CACHE_FORMAT, "gguf", [field.name for field in fields(ModelFacts)], str(path), states)
    return cache.kept(entry, ModelFacts, lambda: _from_gguf(path))


def _from_gguf(path: Path) -> ModelFacts:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MachineError("models.policy.path is a GGUF file, and the package `gguf` is not installed", hint="pip install gguf") from error
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise UsageError(f"{path} is not a whole GGUF file: {error}", hint="was the download or the copy interrupted?") from error

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    tokens = reader.get_field("tokenizer.ggml.tokens")
    attention = {"num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv", "head_dim": "key_length"}
    hidden = value(f"{architecture}.embedding_length")
    shape = {"hidden_size": hidden} | {name: value(f"{architecture}.attention.{key}") for name, key in attention.items()}
    return ModelFacts(
        path=str(path),
        architecture=architecture,
        layers=value(f"{architecture}.block_count"),
        hidden=value(f"{architecture}.embedding_length"),
        vocabulary=None if tokens is None else len(tokens.data),
        max_positions=value(f"{architecture}.context_length"),
        parameters=parameters,
        file_dtype=None,
        plain_attention=not value(f"{architecture}.attn_logit_softcapping"),
        window=value(f"{architecture}.attention.sliding_window") or None,
        attends_only=value(f"{architecture}.ssm.state_size") is None,
        experts=value(f"{architecture}.expert_count") or None,
        key_width=_key_width(shape),
        query_width=_query_width(shape),
        heads=shape["num_attention_heads"],
        inner=_inner({
            "intermediate_size": value(f"{architecture}.feed_forward_length"), "num_experts_per_tok": value(f"{architecture}.expert_used_count"),
        }),
    )
