import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rftcli.models.export import export_hf, stopping_generation_config

IDS = torch.arange(6, 16)[None]


def greedy(model, **changes):
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=20, pad_token_id=0, **changes)[0].tolist()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_round_trip_generates_the_same(zoo, tmp_path, family, tied):
    model = getattr(zoo, family)(tie_word_embeddings=tied).eval()
    trained = {name: tensor.detach().clone() * 1.5 for name, tensor in model.state_dict().items()}  # a gather copies tied weights twice
    export_hf(model, zoo.tokenizer(), trained, tmp_path, eos_ids=(2,))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.state_dict()["lm_head.weight"], trained["lm_head.weight"])
    model.load_state_dict(trained)
    assert torch.equal(again(IDS).logits, model(IDS).logits) and greedy(again) == greedy(model, eos_token_id=2)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118  the file is no mapping


def test_a_tied_weight_may_come_under_one_name(zoo, tmp_path):
    model = zoo.llama(tie_word_embeddings=True).eval()
    export_hf(model, zoo.tokenizer(), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, tmp_path, eos_ids=(2,))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_the_models_own_weights_when_none_are_given(zoo, tmp_path):
    model = zoo.llama().eval()
    export_hf(model, zoo.tokenizer(), None, tmp_path, eos_ids=(2,))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_float32_masters_are_written_in_the_policys_dtype(zoo, tmp_path):
    model = zoo.llama().to(torch.bfloat16)
    masters = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    export_hf(model, zoo.tokenizer(), masters, tmp_path, eos_ids=(2,))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_missing_or_unknown_weight_is_our_mistake(zoo, tmp_path):
    model = zoo.llama()
    weights = dict(model.state_dict())
    with pytest.raises(AssertionError, match="none of the model's"):
        export_hf(model, zoo.tokenizer(), {**weights, "other": torch.zeros(1)}, tmp_path, eos_ids=(2,))
    del weights["model.norm.weight"]
    with pytest.raises(AssertionError, match=r"missing.*model\.norm\.weight"):
        export_hf(model, zoo.tokenizer(), weights, tmp_path, eos_ids=(2,))


def test_the_export_stops_where_training_stopped(zoo, tmp_path):
    """The configuration's end id is 1, the template ends turns with id 3, and the base generation configuration contradicts itself."""
    model = zoo.llama(eos_token_id=1).eval()
    with torch.no_grad():  # a policy that says w9 until it ends its turn
        model.lm_head.weight.zero_()
    model.generation_config = GenerationConfig(eos_token_id=1, do_sample=False, temperature=0.8)
    base = model.generation_config
    tokenizer = zoo.tokenizer()
    export_hf(model, tokenizer, None, tmp_path, eos_ids=(1, 3))
    assert model.generation_config is base and base.temperature == 0.8  # the policy in memory is as it was
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert set(generation.eos_token_id) == {1, 3} and generation.temperature in (None, 1.0)
    words = AutoTokenizer.from_pretrained(tmp_path)
    turn = [{"role": "user", "content": "w9"}]
    assert words.apply_chat_template(turn, tokenize=False) == tokenizer.apply_chat_template(turn, tokenize=False) == "user w9 <|end|> "
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in again.model.layers.parameters():
            parameter.zero_()
        again.model.embed_tokens.weight.zero_()
        again.model.embed_tokens.weight[:, 0] = 1.0
        again.lm_head.weight[3, 0] = 1.0
    assert greedy(again) == [*IDS[0].tolist(), 3]


@pytest.mark.parametrize(
    ("base", "eos", "expected"), [(None, (), None), (None, (5,), 5), (2, (5,), [2, 5]), ([2, 7], (7,), [2, 7]), (0, (0,), 0)]
)
def test_end_ids_are_added_to_those_of_the_base(base, eos, expected):
    assert stopping_generation_config(GenerationConfig(eos_token_id=base), eos, pad=9).eos_token_id == expected


def test_a_configuration_that_samples_keeps_its_flags():
    base = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, pad_token_id=4)
    made = stopping_generation_config(base, (2,), pad=9)
    assert (made.temperature, made.top_p, made.pad_token_id) == (0.6, 0.9, 4)
    assert stopping_generation_config(None, (2,), pad=9).pad_token_id == 9


def test_the_model_card_tells_where_it_comes_from(zoo, tmp_path):
    export_hf(zoo.llama(), zoo.tokenizer(), None, tmp_path, eos_ids=(2,), card={"base": "org/model", "steps": "50"})
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n") and "| base | org/model |\n| steps | 50 |" in text
