"""Reward models with a head: scores do not depend on company, heads are never made up, marks of the tokenizer come exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from rftcli.errors import UsageError
from rftcli.models.classifier import Texts, heads, load_classifier, max_positions, next_token_logits

ROWS = [[1, 7, 8, 9, 10, 11, 2], [1, 7], [1, 50, 51, 52, 2, 2], [12], [1, 2]]
CPU = torch.device("cpu")


def llama(pad: int | None = None) -> LlamaForSequenceClassification:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, num_labels=3, initializer_range=0.3, pad_token_id=pad, eos_token_id=2, max_position_embeddings=64, **shape)
    return LlamaForSequenceClassification(config).eval()


def gpt2(pad: int | None = None) -> GPT2ForSequenceClassification:
    torch.manual_seed(4)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=97, num_labels=3, initializer_range=0.3, pad_token_id=pad, **shape)).eval()


def bert(pad: int | None = 0) -> BertForSequenceClassification:
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=97, num_labels=3, initializer_range=0.3, pad_token_id=0, **shape)).eval()


def alone(model: Any, row: list[int]) -> torch.Tensor:
    """As anybody would score one text."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.int64)).logits[0].double()


@pytest.mark.parametrize("build", [llama, gpt2, bert])
@pytest.mark.parametrize("pad", [None, 2])
def test_a_score_is_that_of_the_text_alone(build: Any, pad: int | None) -> None:
    """Also where padding is the end token, and where the checkpoint names no padding."""
    model = build(pad)
    before = model.config.pad_token_id
    expected = torch.stack([alone(model, row) for row in ROWS])
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        found = heads(model, model.config, [ROWS[index] for index in order], CPU)
        assert found.dtype == torch.float64 and torch.allclose(found, expected[order], atol=1e-5)
    assert torch.allclose(heads(model, model.config, ROWS[:1], CPU), expected[:1], atol=1e-6)
    assert model.config.pad_token_id == before


@pytest.mark.parametrize("build", [llama, gpt2, bert])
def test_a_saved_model_is_loaded_frozen_and_without_dropout(build: Any, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    found = load_classifier(str(tmp_path), dtype="float32", options={}, trust_remote_code=False, device="cpu")
    assert not found.training and not any(parameter.requires_grad for parameter in found.parameters())
    found.train()  # even so
    assert torch.allclose(heads(found, found.config, ROWS, CPU), heads(model, model.config, ROWS, CPU), atol=1e-6)


def test_weights_of_four_bits_score_as_what_they_stand_for(tmp_path: Path) -> None:
    """The same scores as a whole model with the unpacked weights; the head stays whole."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    from rftcli.models.load import quantisation

    model = llama()
    model.save_pretrained(tmp_path)
    few = quantisation(bits=4, kind="nf4", nested=False, dtype="float32")
    found = load_classifier(str(tmp_path), dtype="float32", options={}, trust_remote_code=False, device="cpu", quantised=few)
    packed = {name: part for name, part in found.named_modules() if isinstance(part, Linear4bit)}
    assert len(packed) == 14 and type(found.score) is torch.nn.Linear  # 7 matrices in each of 2 layers
    before = heads(model, model.config, ROWS, CPU)
    for name, part in packed.items():
        model.get_submodule(name).weight.data = dequantize_4bit(part.weight.data, part.weight.quant_state).float()
    expected = heads(model, model.config, ROWS, CPU)
    assert torch.allclose(heads(found, found.config, ROWS, CPU), expected, atol=1e-4) and not torch.allclose(before, expected, atol=1e-2)


def test_a_checkpoint_without_a_head_is_refused(zoo: Any, tmp_path: Path) -> None:
    zoo.llama().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"no weights for `score.weight`: it would score at random"):
        load_classifier(str(tmp_path), dtype="float32", options={}, trust_remote_code=False, device="cpu")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_classifier(str(tmp_path), dtype="float32", options={}, trust_remote_code=False, device="cpu")


TURNS = [{"role": "user", "content": "w10 w11"}, {"role": "assistant", "content": "w12"}]


def marking(zoo: Any, front: bool, back: bool) -> Any:
    """A tokenizer that puts `<s>` in front of a text and `</s>` behind it."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = zoo.tokenizer()
    single = " ".join([*(["<s>"] if front else []), "$A", *(["</s>"] if back else [])])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("text", ["w10 w11", "<s> w10 w11", "w10 w11 </s>", "<s> w10 w11 </s>"])
def test_marks_come_exactly_once(zoo: Any, front: bool, back: bool, text: str) -> None:
    ids = Texts(marking(zoo, front, back)).ids(text)
    assert ids.count(1) == (1 if front or "<s>" in text else 0) and ids.count(2) == (1 if back or "</s>" in text else 0)
    assert [token for token in ids if token > 5] == [10, 11] and (1 not in ids or ids[0] == 1) and (2 not in ids or ids[-1] == 2)
    assert Texts(marking(zoo, front, back)).ids("w10", open_end=True)[-1] == 10


def test_the_scorers_own_template(zoo: Any) -> None:
    texts = Texts(zoo.tokenizer())
    assert texts.rendered(TURNS, "plain") == "user w10 w11 <|end|> assistant w12 <|end|> "
    assert Texts(zoo.tokenizer(), "{{ messages[1].content }}").rendered(TURNS, "plain") == "w12"
    bare = zoo.tokenizer()
    bare.chat_template = None
    assert Texts(bare).rendered(TURNS, "plain") == "plain" and not Texts(bare).has_template
    with pytest.raises(ValueError, match="chat template fails"):
        Texts(zoo.tokenizer(), "{{ messages[5].content.nothing }}").rendered(TURNS, "plain")


def test_texts_that_are_too_long(zoo: Any) -> None:
    texts = Texts(marking(zoo, True, True))
    ids = texts.ids("w10 w11 w12 w13")
    assert texts.fitted(ids, 6, cut=False) == (ids, False) and texts.fitted(ids, None, cut=False) == (ids, False)
    assert texts.fitted(ids, 4, cut=True) == ([1, 12, 13, 2], True)
    assert texts.fitted(ids, 1, cut=True) == ([2], True)
    with pytest.raises(ValueError, match="has 6 tokens, the scorer takes at most 5"):
        texts.fitted(ids, 5, cut=False)


def test_positions() -> None:
    assert max_positions(llama().config) == 64 and max_positions(gpt2().config) == 64


def test_scores_of_the_next_token_are_those_of_a_row_alone(zoo: Any) -> None:
    model = zoo.llama().eval()
    found = next_token_logits(model, ROWS, CPU, 2)
    for row, one in zip(ROWS, found, strict=True):
        with torch.no_grad():
            assert torch.allclose(one, model(torch.tensor([row])).logits[0, -1].double(), atol=1e-5)
