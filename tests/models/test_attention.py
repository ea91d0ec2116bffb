"""Packed attention: the log-probs and gradients of a plain forward, without a mask over the whole pack."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForTokenClassification, MistralConfig, MistralForCausalLM

from rftcli.algo.align import Row, packed, padded
from rftcli.algo.logprobs import plain_logprobs
from rftcli.errors import MachineError, UsageError
from rftcli.models.attention import IMPLEMENTATIONS, borders, implementation, packs
from rftcli.models.policy import CausalPolicy
from rftcli.models.value import ValueModel, load_value_model

LENGTHS = (7, 1, 23, 12)
VALUE = {"head": None, "dtype": "float32", "options": {}, "trust_remote_code": False, "device": "cpu"}


def mistral(window: int | None):
    torch.manual_seed(6)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
    return MistralForCausalLM(MistralConfig(vocab_size=97, sliding_window=window, initializer_range=0.2, **shape))


def family(zoo, name):
    made = {"llama": zoo.llama, "gpt2": zoo.gpt2, "window": lambda: mistral(5), "wide window": lambda: mistral(500)}[name]()
    made.config._attn_implementation = "rft_varlen"
    return made.eval()


def rows():
    generator = torch.Generator().manual_seed(1)
    return [Row(torch.randint(97, (length + 1,), generator=generator), 1, torch.ones(length, dtype=torch.bool)) for length in LENGTHS]


def through(policy, inputs):
    names = ("input_ids", "position_ids", "attention_mask", "select", "target_ids")
    return policy(**{name: getattr(inputs, name) for name in names}, temperature=0.7)[0]


def plain(model, attention):
    model.config._attn_implementation = attention
    found = [plain_logprobs(model(input_ids=row.token_ids[None]).logits[0, :-1], row.token_ids[1:], 0.7)[0] for row in rows()]
    return torch.cat(found)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "window", "wide window"])
def test_values_and_gradients_are_those_of_a_plain_forward(zoo, name, layout, checkpointing):
    model = family(zoo, name)
    policy = CausalPolicy(model, gradient_checkpointing=checkpointing)
    if checkpointing:
        policy.train()
    inputs = packed(rows()) if layout == "packed" else padded(rows(), 0)
    weights = torch.linspace(-1, 2, sum(LENGTHS))
    found = through(policy, inputs)
    (found * weights).sum().backward()
    gradients = {key: value.grad.clone() for key, value in model.named_parameters()}
    model.zero_grad()
    expected = plain(model, "eager")
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    for key, value in model.named_parameters():
        torch.testing.assert_close(gradients[key], value.grad, atol=2e-4, rtol=1e-4)


def test_packed_sequences_do_not_see_each_other(zoo):
    policy = CausalPolicy(family(zoo, "llama"))
    before = through(policy, packed(rows()))
    changed = rows()
    changed[2] = changed[2]._replace(token_ids=(changed[2].token_ids + 1) % 97)
    after = through(policy, packed(changed))
    start, end = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    assert torch.equal(before[:start], after[:start]) and torch.equal(before[end:], after[end:])
    assert not torch.equal(before[start:end], after[start:end])


def test_no_mask_over_the_whole_pack_is_made(zoo):
    model = family(zoo, "llama")
    shapes = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(tuple(kwargs["attention_mask"].shape)), with_kwargs=True)
    through(CausalPolicy(model), packed(rows()))
    assert set(shapes) == {(1, 1, 1, 1)}


def test_borders_of_one_token_sequences():
    found = borders(torch.tensor([[0, 0, 1, 2, 0]]))
    assert found["cu_seq_lens_q"].tolist() == [0, 1, 4, 5]
    assert found["max_length_q"] == 3
    assert found["cu_seq_lens_q"].dtype == torch.int32


def test_generation_with_a_cache_goes_on_as_before(zoo):
    model = family(zoo, "llama")
    prompt = torch.tensor([[5, 9, 40, 3]])
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    ours = model.generate(prompt, **settings)
    model.config._attn_implementation = "sdpa"
    assert torch.equal(ours, model.generate(prompt, **settings))


def test_a_critic_is_packed_too(zoo, tmp_path):
    zoo.llama().save_pretrained(tmp_path)
    model = load_value_model(str(tmp_path), attention="varlen", **VALUE)
    assert packs(model)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.Linear) and part.out_features == 1:
                part.weight.normal_()
    found = {}
    for layout, inputs in (("packed", packed(rows())), ("padded", padded(rows(), 0))):
        names = ("input_ids", "position_ids", "attention_mask", "select", "target_ids")
        found[layout] = ValueModel(model)(**{name: getattr(inputs, name) for name in names})[0]
    assert float(found["padded"].detach().abs().max()) > 0.01
    torch.testing.assert_close(found["packed"], found["padded"], atol=1e-5, rtol=1e-5)


def test_a_family_with_soft_caps_is_refused_by_name(zoo):
    model = zoo.gemma()
    model.config._attn_implementation = "rft_varlen"
    with pytest.raises(UsageError, match="softcap"):
        through(CausalPolicy(model.eval(), head="model"), packed(rows()))


def test_a_family_that_loses_the_borders_is_refused_by_name(zoo, monkeypatch):
    model = family(zoo, "llama")
    drop = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, inner=inner, **named: inner(*args, **{key: value for key, value in named.items() if key not in drop})
    with pytest.raises(UsageError, match="does not pass the borders"):
        through(CausalPolicy(model), packed(rows()))


def test_every_kind_has_a_name_and_a_missing_package_is_told():
    assert implementation("sdpa") == "sdpa"
    assert implementation("varlen") == IMPLEMENTATIONS["varlen"]
    for kind in ("flash_2", "flash_3"):
        with pytest.raises(MachineError, match=kind):
            implementation(kind)


def test_a_critic_that_looks_ahead_is_refused(tmp_path):
    """Its values know the tokens that they are to foretell, and the padding."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2)
    BertForTokenClassification(config).save_pretrained(tmp_path)
    for attention in ("sdpa", "eager"):
        with pytest.raises(UsageError, match="looks at the tokens behind") as caught:
            load_value_model(str(tmp_path), attention=attention, **VALUE)
        assert "causal model" in caught.value.hint
