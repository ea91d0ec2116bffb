"""Adapters: what is trained, what is switched off, what is merged, and what a saved one loads as."""

from contextlib import nullcontext

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rftcli import protocols
from rftcli.errors import UsageError
from rftcli.models import lora
from rftcli.models.export import export_hf
from rftcli.models.load import load_causal_lm, quantisation

IDS = torch.arange(6, 16)[None]
KINDS = {
    "plain": {},
    "dora": {"options": {"use_dora": True}},
    "rslora": {"options": {"use_rslora": True, "init_lora_weights": "orthogonal"}},
    "head": {"targets": ["q_proj", "lm_head"]},
    "pattern": {"targets": r".*layers\.1.*(q|v)_proj"},
    "saved": {"targets": ["q_proj"], "save_also": ["lm_head"]},
    "saved embedding": {"targets": ["q_proj"], "save_also": ["embed_tokens"]},
    "excluded": {"options": {"exclude_modules": ["o_proj"]}},
}
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 0.2}


def present(parameters):
    return nullcontext()


def attach(model, **changes):
    arguments = {
        "rank": 4,
        "alpha": 8.0,
        "dropout": 0.0,
        "targets": "all-linear",
        "save_also": (),
        "options": {},
        "start_from": None,
        "base_name": "b",
    }
    return lora.attach(model, **{**arguments, **changes})


def trained(model):
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def move(model):
    """Training, as far as these tests need it."""
    generator = torch.Generator().manual_seed(1)
    for tensor in trained(model).values():
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))


@pytest.fixture
def model(zoo):
    return zoo.llama().eval()


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_off_merged_saved_and_gone_on_from(zoo, tmp_path, kind, dtype):
    model, names = zoo.llama().to(dtype).eval(), set(zoo.llama().state_dict())
    before = model(IDS).logits
    adapter = attach(model, **KINDS[kind])
    assert {tensor.dtype for tensor in trained(model).values()} == {torch.float32}
    assert torch.allclose(model(IDS).logits, before, atol=DTYPES[dtype])  # a new adapter changes nothing
    move(model)
    moved = model(IDS).logits
    assert (moved - before).abs().max() > 0.3
    with adapter.as_reference():
        assert torch.equal(model(IDS).logits, before)
    merged = {name: tensor.clone() for name, tensor in adapter.merged(present)}
    assert torch.equal(model(IDS).logits, moved)  # merging left it alone
    assert set(adapter.plain()) == set(merged) == names

    export_hf(model, zoo.tokenizer(), merged, tmp_path / "policy", eos_ids=(2,), plain=adapter.plain())
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    assert alone.dtype == dtype and torch.allclose(alone(IDS).logits, moved, atol=DTYPES[dtype])
    adapter.save(tmp_path / "adapter", trained(model))
    loaded = peft.PeftModel.from_pretrained(zoo.llama().to(dtype).eval(), tmp_path / "adapter")
    assert torch.allclose(loaded(IDS).logits, moved, atol=DTYPES[dtype])

    again = zoo.llama().to(dtype).eval()
    second = attach(again, start_from=str(tmp_path / "adapter"), copy_for_reference=True)
    assert torch.equal(again(IDS).logits, moved)
    assert set(trained(again)) == set(trained(model))
    move(again)
    with second.as_reference():
        assert torch.equal(again(IDS).logits, moved)
    assert not torch.equal(again(IDS).logits, moved) and set(trained(again)) == set(trained(model))
    assert set(second.plain()) == {name for name, _ in second.merged(present)} == names


@torch.no_grad()
def test_merged_weights_are_rounded_once(zoo):
    """Of a model in bfloat16: what comes out are sums in float32, which whoever takes them rounds."""
    model = zoo.llama().to(torch.bfloat16).eval()
    adapter = attach(model)
    move(model)
    (prefix, layer) = next((name, module) for name, module in model.named_modules() if name.endswith("q_proj"))
    merged = {name: tensor.clone() for name, tensor in adapter.merged(present)}[f"{prefix}.weight"]
    change = 2.0 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    exact = layer.get_base_layer().weight.double() + change
    assert merged.dtype == torch.float32 and torch.allclose(merged.double(), exact, atol=1e-6)
    assert (exact - merged.bfloat16().double()).abs().max() > 1e-5  # a sum in bfloat16 would be seen


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_base_and_adapter_apart(zoo, tmp_path, dtype):
    """For an engine that holds both: the base is the model as it was, bit for bit, and the files are the adapter of now."""
    model = zoo.llama().to(dtype).eval()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    weights = lora.AdaptedWeights(attach(model), present)
    assert isinstance(weights, protocols.AdaptedWeights)
    for number in range(2):
        move(model)
        base = dict(weights.base())
        assert base.keys() == before.keys() == dict(weights).keys() and all(torch.equal(base[name], before[name]) for name in before)
        weights.save_adapter(tmp_path / str(number))
        loaded = peft.PeftModel.from_pretrained(zoo.llama().to(dtype).eval(), tmp_path / str(number))
        assert torch.allclose(loaded(IDS).logits, model(IDS).logits, atol=DTYPES[dtype])


@torch.no_grad()
def test_a_family_with_transposed_and_tied_weights(zoo, tmp_path):
    model = zoo.gpt2().eval()
    adapter = attach(model)
    move(model)
    merged = {name: tensor.clone() for name, tensor in adapter.merged(present)}
    assert "lm_head.weight" not in merged
    export_hf(model, zoo.tokenizer(), merged, tmp_path, eos_ids=(2,), plain=adapter.plain())
    assert torch.allclose(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(IDS).logits, model(IDS).logits, atol=1e-4)


@pytest.mark.parametrize("changes", [{"targets": ["q_proj", "lm_head"]}, {"save_also": ["lm_head"]}, {"save_also": ["embed_tokens"]}])
def test_one_of_two_tied_weights_is_refused(zoo, changes):
    with pytest.raises(UsageError, match="shares its weight with the"):
        attach(zoo.llama(tie_word_embeddings=True), **changes)


def test_names_that_are_not_in_the_model(model):
    with pytest.raises(UsageError, match=r"models.policy.lora: Target modules .*nowhere"):
        attach(model, targets=["nowhere"])


def test_what_is_no_lora_adapter_is_refused(zoo, tmp_path):
    with pytest.raises(UsageError, match=r"models\.policy\.lora"):
        attach(zoo.llama(), start_from=str(tmp_path))
    other = peft.get_peft_model(zoo.llama(), peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]))
    other.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"is a .*IA3 adapter, not LoRA"):
        attach(zoo.llama(), start_from=str(tmp_path))


def test_dropout_is_the_recipes_even_where_an_adapter_brings_its_own(zoo, tmp_path):
    model = zoo.llama()
    attach(model, dropout=0.3).save(tmp_path, trained(model))
    for dropout in (0.0, 0.2):
        again = zoo.llama()
        attach(again, dropout=dropout, start_from=str(tmp_path))
        found = {module.p for name, module in again.named_modules() if isinstance(module, torch.nn.Dropout) and "lora_dropout" in name}
        assert found == ({dropout} if dropout else set())


@torch.no_grad()
@pytest.mark.parametrize(("bits", "kind", "nested"), [(4, "nf4", False), (4, "fp4", False), (4, "nf4", True), (8, "nf4", False)])
def test_quantised_weights_under_an_adapter(zoo, tmp_path, bits, kind, nested):
    """Trained, merged and unpacked: what is exported computes what the trained policy does; the base is really in few bits."""
    zoo.llama().save_pretrained(tmp_path / "base")
    few = quantisation(bits=bits, kind=kind, nested=nested, dtype="float32")
    load = {"dtype": "float32", "attention": "sdpa", "dropout": 0.0, "options": {}, "trust_remote_code": False, "device": "cpu"}
    model = load_causal_lm(str(tmp_path / "base"), **load, quantised=few)
    adapter = attach(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.uint8 if bits == 4 else torch.int8}
    model(IDS)  # a pass without gradients: where bitsandbytes would pack the weights anew
    with torch.enable_grad():
        model.train()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        slope = sum(float(p.grad.square().sum()) for p in model.parameters() if p.requires_grad)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.sub_(1e-3 * parameter.grad)
        fallen = float((loss - model(IDS, labels=IDS).loss).detach())
        assert fallen == pytest.approx(1e-3 * slope, rel=0.2)  # the gradient is that of the loss
    model.eval()
    move(model)
    scores = model(IDS).logits
    merged = {name: tensor.clone() for name, tensor in adapter.merged(present)}
    export_hf(model, zoo.tokenizer(), merged, tmp_path / "policy", eos_ids=(2,), plain=adapter.plain())
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    assert not hasattr(alone.config, "quantization_config") and {p.dtype for p in alone.parameters()} == {torch.float32}
    assert torch.allclose(alone(IDS).logits, scores, atol=1e-3 if bits == 4 else 0.5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    moved = (merged["model.layers.0.self_attn.q_proj.weight"] - base.state_dict()["model.layers.0.self_attn.q_proj.weight"]).abs().max()
    assert moved > 1e-3
