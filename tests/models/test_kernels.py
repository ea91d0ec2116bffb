"""Fused kernels: what is replaced in which model, what is not, and which models are refused. Shown with a stand-in that computes by torch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, NemotronConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from rftcli.errors import MachineError, UsageError
from rftcli.models import lora
from rftcli.models.kernels import apply, switches
from rftcli.models.load import load_causal_lm
from rftcli.models.policy import CausalPolicy
from rftcli.models.value import load_value_model

IDS = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(1))
FAMILIES = (modeling_gemma2, modeling_llama, modeling_mixtral)


def forget() -> dict[str, Any]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "liger_kernel"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The stand-in is the package for as long as a test runs; what of it ran."""
    for family in FAMILIES:
        monkeypatch.setattr(family, "apply_rotary_pos_emb", family.apply_rotary_pos_emb)  # undone at the end
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "stand_ins")
    kept = forget()
    from liger_kernel.transformers.monkey_patch import CALLS

    yield CALLS
    forget()
    sys.modules.update(kept)


def load(path: Path, kernels: str) -> Any:
    return load_causal_lm(
        str(path), dtype="float32", attention="eager", dropout=0.0, options={}, trust_remote_code=False, device="cpu", kernels=kernels
    )


def passes(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(log-probs of the row's own next tokens, the gradient of their sum by name)"""
    width = IDS.shape[1]
    select = torch.cat([row * width + torch.arange(width - 1) for row in range(2)])
    positions = torch.arange(width).expand(2, -1)
    found, _ = CausalPolicy(model)(IDS, positions, torch.ones_like(IDS), select, IDS[:, 1:].flatten(), 0.7)
    model.zero_grad()
    found.sum().backward()
    return found.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"rms_norm": 5, "rope": 2, "swiglu": 2}),
        ("gemma", {"rms_norm": 9, "rope": 2, "geglu": 2}),
    ],
)
def test_the_same_model_with_other_kernels(zoo, calls: Counter[str], tmp_path: Path, family: str, expected: dict[str, int]) -> None:
    getattr(zoo, family)().save_pretrained(tmp_path)
    before = passes(load(tmp_path, "none"))
    assert not calls
    model = load(tmp_path, "liger")
    logprobs, gradients = passes(model)
    assert calls == expected
    assert torch.allclose(logprobs, before[0], atol=1e-5)
    assert list(gradients) == list(before[1])
    assert all(torch.allclose(gradients[name], before[1][name], rtol=1e-3, atol=1e-4) for name in gradients)
    assert "forward" not in vars(model) and nn.functional.cross_entropy.__module__ == "torch.nn.functional"


def test_a_model_that_is_loaded_later_keeps_what_it_has(calls: Counter[str], tmp_path: Path) -> None:
    """Biases of gated layers, which Liger's classes have not, and its own norms; the rotary embedding is the family's."""
    config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, mlp_bias=True)
    model = LlamaForCausalLM(config)
    nn.init.normal_(model.model.layers[0].mlp.gate_proj.bias)
    model.save_pretrained(tmp_path)
    first, second, plain = load(tmp_path, "liger"), load(tmp_path, "liger"), load(tmp_path, "none")
    names = [name for name, _ in model.named_parameters()]
    assert all([name for name, _ in loaded.named_parameters()] == names for loaded in (first, second, plain))
    expected = passes(plain)[0]
    assert calls == {"rope": 1}
    assert torch.allclose(passes(first)[0], expected, atol=1e-5) and torch.allclose(passes(second)[0], expected, atol=1e-5)
    assert calls == {"rope": 3, "rms_norm": 6, "swiglu": 2}


def test_experts_stay_as_they_are(calls: Counter[str]) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=97, num_local_experts=4, **shape))
    assert switches(model.config) == {"rope": True, "cross_entropy": False, "fused_linear_cross_entropy": False, "rms_norm": True, "swiglu": False}
    apply(model)
    passes(model)
    assert calls == {"rope": 1, "rms_norm": 3}


def test_a_critic_has_them_too(zoo, calls: Counter[str], tmp_path: Path) -> None:
    zoo.llama().save_pretrained(tmp_path)
    model = load_value_model(
        str(tmp_path), head=None, dtype="float32", attention="eager", options={}, trust_remote_code=False, device="cpu", kernels="liger"
    )
    model(IDS)
    assert calls == {"rms_norm": 5, "rope": 2, "swiglu": 2}


def test_an_adapter_around_replaced_layers(zoo, calls: Counter[str]) -> None:
    """Adapted layers are those that the kernels call, and a norm that is trained as a copy is a norm of its own."""
    model = zoo.llama()
    apply(model)
    lora.attach(model, rank=2, alpha=4, dropout=0.0, targets="all-linear", save_also=("norm",), options={}, start_from=None, base_name="m")
    _, gradients = passes(model)
    assert calls == {"rms_norm": 5, "rope": 2, "swiglu": 2}
    trained = {name for name, gradient in gradients.items() if gradient.any()}
    assert any("mlp.gate_proj" in name for name in trained) and any("norm.modules_to_save" in name for name in trained)
    assert not any("original_module" in name for name in gradients)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "no kernels for models of the family `gpt2`"),
        (NemotronConfig(), "no kernels for models of the family `nemotron`"),
        (LlamaConfig(hidden_act="gelu"), "computes silu, and this model's activation is gelu"),
    ],
)
def test_what_is_refused_before_weights_are_read(calls: Counter[str], tmp_path: Path, config: Any, message: str) -> None:
    config.save_pretrained(tmp_path)  # and no weights
    with pytest.raises(UsageError, match=message) as caught:
        load(tmp_path, "liger")
    assert caught.value.hint == "leave `train.kernels` out"
    with pytest.raises(UsageError, match=message):
        load_value_model(
            str(tmp_path), head=None, dtype="float32", attention="eager", options={}, trust_remote_code=False, device="cpu", kernels="liger"
        )


def test_code_that_came_with_a_model_is_refused(calls: Counter[str]) -> None:
    class Own(LlamaForCausalLM):
        """As code of a model directory: the family's configuration, and layers that nobody knows."""

    with pytest.raises(UsageError, match="Own is code that came with the model"):
        apply(Own(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(MachineError, match="needs the package `liger-kernel`") as caught:
        switches(LlamaConfig())
    assert caught.value.hint == "pip install 'rftcli[liger]'"
