"""Facts about a model from its files alone, and every way in which the files can be wrong, found before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rftcli.builtin import builtin_path
from rftcli.errors import EXIT_MACHINE, MachineError, UsageError
from rftcli.probe.model import model_facts

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False, "dtype": "float16",
}  # fmt: skip
LLAMA_3_8B = LLAMA_2_7B | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
SMOLLM2_135M = LLAMA_2_7B | {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]], size: dict[str, int] | None = None) -> None:
    """A file of zeros in the safetensors format: eight bytes of length, a JSON header, the data."""
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8} | (size or {})
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        count = 1
        for side in shape:
            count *= side
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count * sizes[dtype]]}
        end += count * sizes[dtype]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return folder


def test_the_headers_of_the_weights_count(directory: Path) -> None:
    safetensors(directory / "model.safetensors", {"a": ("BF16", [10, 20]), "b": ("F32", [7]), "scalar": ("F32", [])})
    facts = model_facts(str(directory))
    assert (facts.parameters, facts.file_dtype) == (208, "bfloat16")  # the number type of most of them
    assert (facts.path, facts.architecture, facts.layers, facts.hidden) == (str(directory), "LlamaForCausalLM", 32, 4096)
    assert (facts.vocabulary, facts.max_positions) == (32000, 4096)


def test_shards_count_once_and_copies_do_not(directory: Path) -> None:
    for number in (1, 2):
        safetensors(directory / f"model-0000{number}-of-00002.safetensors", {f"w{number}": ("F16", [100])})
    index = {"weight_map": {"w1": "model-00001-of-00002.safetensors", "w2": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    safetensors(directory / "consolidated.safetensors", {"other.w": ("F16", [200])})
    assert model_facts(str(directory)).parameters == 200
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UsageError, match="1 of 2 files of weights are missing, the first is model-00002-of-00002"):
        model_facts(str(directory))


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA_2_7B, 6_738_415_616), (LLAMA_3_8B, 8_030_261_248), (SMOLLM2_135M, 134_515_008)],
)
def test_an_estimate_where_the_weights_have_another_format(directory: Path, config: dict[str, Any], parameters: int) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "pytorch_model.bin").write_bytes(b"")
    facts = model_facts(str(directory))
    assert (facts.parameters, facts.file_dtype) == (parameters, "float16")


@pytest.mark.parametrize(
    "change",
    [{"num_local_experts": 8}, {"intermediate_size": [1, 2]}, {"intermediate_size": None}, {"num_attention_heads": 0}, {"hidden_size": "4096"}],
)
def test_no_estimate_of_another_shape(directory: Path, change: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(LLAMA_2_7B | change))
    (directory / "pytorch_model.bin").write_bytes(b"")
    assert model_facts(str(directory)).parameters is None


def test_other_names_of_the_same_facts(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"")
    gpt2 = {"n_layer": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257, "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(gpt2))
    facts = model_facts(str(directory))
    assert (facts.layers, facts.hidden, facts.max_positions, facts.architecture, facts.file_dtype) == (12, 768, 1024, None, "float32")
    (directory / "config.json").write_text(json.dumps({"architectures": ["VL"], "text_config": LLAMA_2_7B}))
    assert model_facts(str(directory)).max_positions == 4096
    (directory / "config.json").write_text(json.dumps(LLAMA_2_7B | {"text_config": None}))
    assert model_facts(str(directory)).layers == 32


@pytest.mark.parametrize(
    ("change", "plain"),
    [({}, True), ({"attn_logit_softcapping": 50.0}, False), ({"attn_logit_softcapping": None}, True), ({"model_type": "gpt_oss"}, False)],
)
def test_what_attention_does_to_its_scores(directory: Path, change: dict[str, Any], plain: bool) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"")
    (directory / "config.json").write_text(json.dumps(LLAMA_2_7B | change))
    assert model_facts(str(directory)).plain_attention is plain


@pytest.mark.parametrize(
    ("change", "window", "attends_only"),
    [
        ({}, None, True),
        ({"sliding_window": 4096}, 4096, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, None, True),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 32}, None, True),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}, 512, True),
        ({"layer_types": ["linear_attention", "full_attention"] * 16}, None, False),
        ({"attention_chunk_size": 8192}, None, False),
        ({"mamba_d_state": 16}, None, False),
    ],
)
def test_what_layers_see_of_a_sequence(directory: Path, change: dict[str, Any], window: int | None, attends_only: bool) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"")
    (directory / "config.json").write_text(json.dumps(LLAMA_2_7B | change))
    facts = model_facts(str(directory))
    assert (facts.window, facts.attends_only) == (window, attends_only)


def test_the_builtin_model() -> None:
    facts = model_facts(str(builtin_path("quickstart")))
    assert facts.parameters is not None and 700_000 < facts.parameters < 900_000 and facts.max_positions is not None


def damage(folder: Path, what: str) -> None:
    weights = folder / "model.safetensors"
    safetensors(weights, {"a": ("F32", [100])})
    whole = weights.read_bytes()
    match what:
        case "no config":
            (folder / "config.json").unlink()
        case "broken config":
            (folder / "config.json").write_text("{")
        case "config of a list":
            (folder / "config.json").write_text("[]")
        case "no weights":
            weights.unlink()
        case "cut short":
            weights.write_bytes(whole[:-1])
        case "cut in the header":
            weights.write_bytes(whole[:40])
        case "empty":
            weights.write_bytes(b"")
        case "pointer":
            weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 400\n")
        case "no header":
            weights.write_bytes(struct.pack("<Q", 4) + b"\xff\xff\xff\xff" + bytes(100))


@pytest.mark.parametrize(
    ("what", "message", "hint"),
    [
        ("no config", "holds no config.json", "save_pretrained"),
        ("broken config", "config.json is not JSON", None),
        ("config of a list", "config.json is not a model configuration", None),
        ("no weights", "holds no weights", "save_pretrained"),
        ("cut short", "model.safetensors is cut short", "interrupted"),
        ("cut in the header", "model.safetensors is not a whole safetensors file", "cut short"),
        ("empty", "model.safetensors is not a whole safetensors file", None),
        ("pointer", "model.safetensors is not a whole safetensors file", "cut short"),
        ("no header", "model.safetensors is not a whole safetensors file", "cut short"),
    ],
)
def test_damaged_directories(directory: Path, what: str, message: str, hint: str | None) -> None:
    damage(directory, what)
    with pytest.raises(UsageError) as caught:
        model_facts(str(directory))
    assert message in caught.value.message and str(directory) in caught.value.message
    assert hint is None or (caught.value.hint is not None and hint in caught.value.hint)


@pytest.mark.parametrize("path", ["/no/such/place", "./missing", "../missing", "~/missing-model", "plain", "a/b/c"])
def test_a_path_that_leads_nowhere(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        model_facts(path)
    assert caught.value.hint is not None and ".gguf" in caught.value.hint


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"x")
    with pytest.raises(UsageError, match="neither a model directory nor a GGUF file"):
        model_facts(str(tmp_path / "weights.pt"))


def test_a_hub_that_cannot_be_reached() -> None:
    """Tests run without a network: the same as on a machine without one."""
    with pytest.raises(MachineError) as caught:
        model_facts("no-such-organisation/no-such-model")
    assert caught.value.exit_code == EXIT_MACHINE and "hf download no-such-organisation/no-such-model" in str(caught.value.hint)


@pytest.mark.parametrize("path", ["my org/model", "org/mo--del", "org/.model", "a/b?"])
def test_what_cannot_be_a_name_on_the_hub(path: str) -> None:
    with pytest.raises(UsageError, match="no name of a model on the hub"):
        model_facts(path)


def gguf(path: Path) -> None:
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(8)
    writer.add_context_length(128)
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    gguf(path)
    facts = model_facts(str(path))
    assert (facts.architecture, facts.layers, facts.hidden, facts.max_positions, facts.vocabulary) == ("llama", 2, 8, 128, 3)
    assert (facts.parameters, facts.file_dtype, facts.path) == (32, None, str(path))
    whole = path.read_bytes()
    for length in (0, 4, 40, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="is not a whole GGUF file"):
            model_facts(str(path))
    path.write_text("not a model at all, only some words\n")
    with pytest.raises(UsageError, match="is not a whole GGUF file"):
        model_facts(str(path))


def test_a_gguf_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its facts are kept for as long as the file does not change; of a file that was written just now they are not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, kept = tmp_path / "small.gguf", tmp_path / "cache" / "rft" / "data"
    gguf(path)
    facts = model_facts(str(path))
    assert not kept.exists()
    os.utime(path, (1_000_000_000, 1_000_000_000))
    assert model_facts(str(path)) == facts
    (entry,) = kept.iterdir()
    entry.write_text(entry.read_text().replace('"layers": 2', '"layers": 22'))
    assert model_facts(str(path)) == dataclasses.replace(facts, layers=22)
    os.utime(path, (1_000_000_001, 1_000_000_001))
    assert model_facts(str(path)) == facts


CACHED = """
import sys
from rftcli.errors import UsageError
from rftcli.probe.model import model_facts, tokenizer_commit
for revision in (None, "v1", "{old}"):
    facts = model_facts("org/tiny", revision)
    print(facts.revision, facts.hidden)
print(tokenizer_commit("org/tiny"), tokenizer_commit(sys.argv[1]))
"""


def test_a_revision_is_pinned_to_its_commit(tmp_path: Path) -> None:
    """Branch, tag or nothing: the commit, here from the hub's cache on disk; a directory has none."""
    old, new = "0" * 39 + "1", "0" * 39 + "2"
    cache = tmp_path / "models--org--tiny"
    for commit, hidden in ((old, 8), (new, 16)):
        folder = cache / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": hidden}))
        (folder / "tokenizer_config.json").write_text("{}")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(new)
    (cache / "refs" / "v1").write_text(old)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CACHED.format(old=old), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:4] == [f"{new} 16", f"{old} 8", f"{old} 8", f"{new} None"]


@pytest.mark.parametrize(
    ("rope", "switch"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 2048}, 2048),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1024}}, 1024),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 1024}}, None),
        ({}, None),
    ],
)
def test_where_the_longest_row_changes_the_frequencies_of_all(directory: Path, rope: dict[str, Any], switch: int | None) -> None:
    (directory / "config.json").write_text(json.dumps(LLAMA_2_7B | rope))
    safetensors(directory / "model.safetensors", {"a": ("BF16", [10, 20])})
    assert model_facts(str(directory)).rope_switch == switch
