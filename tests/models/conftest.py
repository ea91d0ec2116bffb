"""Tiny random models and a word tokenizer with a chat template."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", "<|end|>", "user", "assistant"]
TEMPLATE = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' <|end|> ' }}{% endfor %}"


def build_tokenizer(vocab: int = 97, **changes) -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate([*WORDS, *(f"w{index}" for index in range(len(WORDS), vocab))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **{"bos_token": "<s>", "eos_token": "</s>", **changes})
    made.chat_template = TEMPLATE
    return made


def build_llama(vocab: int = 97, **changes) -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, max_position_embeddings=512, initializer_range=0.2, **{**shape, **changes}))


def build_gpt2(vocab: int = 97, **changes) -> GPT2LMHeadModel:
    torch.manual_seed(4)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, **{**shape, **dropout, **changes}))


def build_gemma(vocab: int = 97, **changes) -> Gemma2ForCausalLM:
    """A family whose scores are capped softly after the head."""
    torch.manual_seed(5)
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Gemma2Config(vocab_size=vocab, initializer_range=0.5, final_logit_softcapping=3.0, sliding_window=16, **{**shape, **changes})
    config._attn_implementation = changes.get("attn_implementation", "eager")
    return Gemma2ForCausalLM(config)


@pytest.fixture(scope="session")
def zoo():
    """The builders above, under one name."""
    return SimpleNamespace(tokenizer=build_tokenizer, llama=build_llama, gpt2=build_gpt2, gemma=build_gemma)
