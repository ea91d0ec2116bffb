import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rftcli.errors import UsageError
from rftcli.models.export import export_hf
from rftcli.models.freeze import freeze
from rftcli.models.load import load_tokenizer
from rftcli.models.vocabulary import add_tokens, check_ids, grow_embeddings


@pytest.mark.parametrize("tied", [False, True])
def test_added_tokens_have_rows_and_are_exported(zoo, tmp_path, tied):
    tokenizer, model = zoo.tokenizer(), zoo.llama(tie_word_embeddings=tied)
    before = model.get_input_embeddings().weight.detach().clone()
    add_tokens(tokenizer, ["<plan>", "<act>"])
    grow_embeddings(model, tokenizer)
    rows = model.get_input_embeddings().weight.detach()
    assert rows.shape[0] == len(tokenizer) == 99 == model.config.vocab_size and torch.equal(rows[:97], before)
    assert tokenizer("w7 <plan> w8", add_special_tokens=False)["input_ids"] == [7, 97, 8]
    assert tokenizer.decode([97], skip_special_tokens=True) == "<plan>"  # ordinary: rewards see it
    export_hf(model, tokenizer, None, tmp_path, eos_ids=(2,))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.get_input_embeddings().weight, rows) and len(AutoTokenizer.from_pretrained(tmp_path)) == 99


def test_every_load_of_a_grown_model_is_the_same(zoo):
    """Ranks, the reference and a rollout's replica grow it each on their own; nobody's random numbers are touched."""
    tokenizer = zoo.tokenizer()
    add_tokens(tokenizer, ["<plan>"])
    rows = []
    for seed in (1, 2):
        model = zoo.llama()
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        grow_embeddings(model, tokenizer)
        assert torch.equal(torch.get_rng_state(), state)
        rows.append(model.state_dict())
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])
    assert rows[0]["model.embed_tokens.weight"][97].abs().max() > 0


def test_spare_rows_are_used_first(zoo):
    tokenizer, model = zoo.tokenizer(), zoo.llama(vocab=128)
    add_tokens(tokenizer, ["<plan>"])
    grow_embeddings(model, tokenizer)
    assert model.get_input_embeddings().weight.shape[0] == 128


def test_a_token_that_is_there_already(zoo):
    with pytest.raises(UsageError, match="the tokenizer has `w9` already"):
        add_tokens(zoo.tokenizer(), ["w9"])


def test_a_tokenizer_with_more_ids_than_rows(zoo):
    check_ids(zoo.llama(), zoo.tokenizer())
    with pytest.raises(UsageError, match="the tokenizer has 120 tokens, the model has embeddings for 97"):
        check_ids(zoo.llama(), zoo.tokenizer(120))


def test_tokenizer_options_reach_from_pretrained(zoo, tmp_path):
    zoo.tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), options={"padding_side": "left"}).padding_side == "left"
    assert load_tokenizer(str(tmp_path)).padding_side == "right"


def test_frozen_parameters_are_counted(zoo):
    model = zoo.llama()
    tensors, parameters = freeze(model, ["model.embed_tokens.*", "*.layers.0.*"])
    frozen = {name: p.numel() for name, p in model.named_parameters() if not p.requires_grad}
    assert tensors == len(frozen) == 10 and parameters == sum(frozen.values())
    assert all(name.startswith(("model.embed_tokens.", "model.layers.0.")) for name in frozen)


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        (["model.layers.9.*"], "`model.layers.9.*` matches no parameter"),
        (["model.*", "vision.*"], "`vision.*` matches no parameter"),
        (["embed_tokens"], "`embed_tokens` matches no parameter"),
        (["*"], "freezes all parameters"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything(zoo, patterns, problem):
    model = zoo.llama()
    with pytest.raises(UsageError) as caught:
        freeze(model, patterns)
    assert problem in caught.value.message and all(p.requires_grad for p in model.parameters())
