"""Critics: the layouts agree, saved ones load again, foreign heads are found. Routers: balance within sequences, whatever the micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rftcli.algo.align import Row, packed, padded
from rftcli.errors import UsageError
from rftcli.models.policy import CausalPolicy
from rftcli.models.value import ValueModel, export_value_model, load_value_model


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for prompt, sampled in ((5, 9), (1, 1), (12, 20), (3, 0), (2, 7)):
        mask = torch.rand(sampled, generator=generator) < 0.8
        found.append(Row(torch.randint(0, 97, (prompt + sampled,), generator=generator), prompt, mask))
    return found


def fields(inputs) -> dict:
    return {name: getattr(inputs, name) for name in ("input_ids", "position_ids", "attention_mask", "select", "target_ids")}


def load(path: Path, **changes):
    settings = {"head": None, "dtype": "float32", "attention": "sdpa", "options": {}, "trust_remote_code": False, "device": "cpu"}
    return load_value_model(str(path), **{**settings, **changes})


@pytest.fixture
def policy_folder(zoo, tmp_path: Path) -> Path:
    zoo.llama(attention_dropout=0.1).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def test_a_new_head_says_0_and_the_backbone_is_the_policys(zoo, policy_folder: Path) -> None:
    model = load(policy_folder)
    values, _ = ValueModel(model)(**fields(padded(rows(), 0)))
    assert values.dtype == torch.float32 and values.shape == (sum(int(row.mask.sum()) for row in rows()),) and not values.any()
    for name, parameter in zoo.llama().model.named_parameters():
        assert torch.equal(parameter, dict(model.model.named_parameters())[name]), name
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_values_are_those_before_each_token_in_both_layouts(zoo, tmp_path: Path, family: str) -> None:
    getattr(zoo, family)().save_pretrained(tmp_path)
    model = load(tmp_path)
    head = model.score if family == "llama" else model.classifier
    torch.nn.init.normal_(head.weight, std=0.3, generator=torch.Generator().manual_seed(2))
    critic = ValueModel(model)
    expected = torch.cat(
        [model(row.token_ids[None]).logits[0, row.prompt_tokens - 1 : -1, 0][row.mask] for row in rows() if row.mask.numel()]
    )
    for inputs in (padded(rows(), 0), packed(rows())):
        values, zeros = critic(**fields(inputs))
        assert torch.allclose(values, expected, atol=1e-5) and not zeros.any()


def test_nothing_trained_still_reaches_every_weight(policy_folder: Path) -> None:
    model = load(policy_folder)
    row = Row(torch.tensor([1, 2, 3]), 2, torch.zeros(1, dtype=torch.bool))
    values, _ = ValueModel(model)(**fields(padded([row], 0)))
    assert values.numel() == 0
    values.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_saved_critic_loads_with_its_head(zoo, policy_folder: Path, tmp_path: Path) -> None:
    model = load(policy_folder)
    weights = {name: tensor + 0.25 for name, tensor in model.named_parameters()}
    export_value_model(model, zoo.tokenizer(), {name: tensor.detach() for name, tensor in weights.items()}, tmp_path / "critic")
    for again in (load(tmp_path / "critic"), AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")):
        assert again.config.num_labels == 1
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, weights[name]), name


def test_a_head_of_another_name(tmp_path: Path) -> None:
    """A reward model's head, under its own name or one that the recipe gives."""
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
    reward = LlamaForSequenceClassification(LlamaConfig(**shape, pad_token_id=0))
    reward.save_pretrained(tmp_path / "reward")
    assert torch.equal(load(tmp_path / "reward").score.weight, reward.score.weight)
    renamed = {name.replace("score.", "v_head."): tensor for name, tensor in reward.state_dict().items()}
    reward.save_pretrained(tmp_path / "named", state_dict=renamed)
    assert torch.equal(load(tmp_path / "named", head="v_head").score.weight, reward.score.weight)
    with pytest.raises(UsageError, match=r"no weights `value\.weight`"):
        load(tmp_path / "named", head="value")


def test_a_family_without_a_value_model(tmp_path: Path) -> None:
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    Olmo2ForCausalLM(Olmo2Config(**shape, pad_token_id=0)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no value model for `olmo2`"):
        load(tmp_path)


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}


def experts(family: str):
    torch.manual_seed(6)
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SMALL, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, intermediate_size=48, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, head_dim=8)
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("head", ["chunked", "model"])
def test_balance_is_the_models_own_loss_of_each_sequence(family: str, head: str) -> None:
    model = experts(family)
    policy = CausalPolicy(model, head=head, balance=True)
    with torch.no_grad():
        expected = torch.stack([model(row.token_ids[None], output_router_logits=True).aux_loss for row in rows()])
    for inputs in (padded(rows(), 0), packed(rows())):
        policy(**fields(inputs), temperature=1.0)
        assert policy.router_losses is not None and torch.allclose(policy.router_losses, expected, atol=1e-5)
    assert float(expected.min()) >= 1.0
    policy.router_losses.sum().backward()
    gate = next(parameter for name, parameter in model.named_parameters() if "gate.weight" in name)
    assert gate.grad is not None and gate.grad.any()


def test_balance_is_measured_only_when_asked_and_with_gradients() -> None:
    policy = CausalPolicy(experts("mixtral"), balance=True)
    with torch.no_grad():
        policy(**fields(padded(rows(), 0)), temperature=1.0)
    assert policy.router_losses is None
    plain = CausalPolicy(experts("mixtral"))
    plain(**fields(padded(rows(), 0)), temperature=1.0)
    assert plain.router_losses is None


def test_a_model_without_a_router_is_refused(zoo) -> None:
    policy = CausalPolicy(zoo.llama(), balance=True)
    with pytest.raises(UsageError, match="router_loss"):
        policy(**fields(padded(rows(), 0)), temperature=1.0)
