"""Which modules ZeRO-3 gathers as one."""

from __future__ import annotations

import torch
from deepspeed.utils import get_z3_leaf_modules
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rftcli.runtime.whole_layers import gather_whole_layers

CONFIG = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0
)


class Wrapped(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, torch.nn.Linear(8, 1)


def test_every_decoder_layer_of_a_model_however_deep_it_lies() -> None:
    for model in (LlamaForCausalLM(CONFIG), LlamaForSequenceClassification(CONFIG), Wrapped(LlamaForCausalLM(CONFIG))):
        assert gather_whole_layers(model) == 3
        assert [type(leaf).__name__ for leaf in get_z3_leaf_modules(model)] == ["LlamaDecoderLayer"] * 3


def test_where_some_weights_are_frozen_linear_by_linear() -> None:
    model = LlamaForCausalLM(CONFIG)
    model.model.embed_tokens.weight.requires_grad_(False)
    assert gather_whole_layers(model) == 0 and get_z3_leaf_modules(model) == []
    assert gather_whole_layers(model.requires_grad_(False)) == 3  # a model that is only read


def test_a_module_that_says_nothing_of_its_layers() -> None:
    assert gather_whole_layers(torch.nn.Linear(2, 2)) == 0
