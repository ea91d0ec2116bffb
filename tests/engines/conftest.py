"""A tokenizer whose text has no spaces of its own, and tiny random models over its vocabulary."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rftcli.engines.hf import HFSampler
from rftcli.types import Prompt, Request

PIECES = ["<unk>", "<s>", "</s>", "<|end|>", "sun", "day", "sunday", "x"]
EOS, END, SUN, DAY, SUNDAY, X = 2, 3, 4, 5, 6, 7


def build_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    words = {piece: index for index, piece in enumerate([*PIECES, *(f"[{index}]" for index in range(len(PIECES), vocab))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|end|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def build_llama(vocab: int, **changes) -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab, max_position_embeddings=512, initializer_range=0.2, **{**shape, **changes})
    return LlamaForCausalLM(config).eval()


def build_gpt2(vocab: int, **changes) -> GPT2LMHeadModel:
    torch.manual_seed(4)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, **{**shape, **changes})).eval()


def build_bigram(table) -> LlamaForCausalLM:
    """A Llama whose next-token scores are `table` (V, V)[last token], V <= 64: one-hot embeddings, layers that add nothing, a chosen head."""
    table = torch.as_tensor(table, dtype=torch.float32)
    vocab = len(table)
    model = build_llama(vocab, rms_norm_eps=0.0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, 64))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :vocab] = table.T / 8.0  # the norm of a one-hot vector of 64 makes it an 8
    return model


def build_chain(*steps: tuple[int, int], vocab: int = 12) -> LlamaForCausalLM:
    """A model that surely answers `b` after `a` for each step (a, b), and END where nothing is said."""
    table = torch.full((vocab, vocab), -200.0)
    table[:, END] = 0.0
    for last, following in steps:
        table[last, END], table[last, following] = -200.0, 0.0
    return build_bigram(table)


def make_prompt(draw: int, ids) -> Prompt:
    return Prompt(draw=draw, row=draw, row_id=f"train:{draw}", source="train", label="math", text="", token_ids=tuple(ids))


def make_request(draw: int, ids, samples=(0, 1, 2, 3), **rest) -> Request:
    return Request(prompt=make_prompt(draw, ids), samples=tuple(samples), **rest)


def make_sampler(model, vocab: int, **changes) -> HFSampler:
    settings = {"pad_id": 0, "batch_rows": 8, "device": "cpu", "owns_weights": False, "eos_ids": (EOS,), **changes}
    return HFSampler(model, build_tokenizer(vocab), settings.pop("eos_ids"), **settings)


@pytest.fixture(scope="session")
def kit():
    """The functions above, under one name."""
    names = ("build_tokenizer", "build_llama", "build_gpt2", "build_bigram", "build_chain", "make_prompt", "make_request", "make_sampler")
    ids = {"EOS": EOS, "END": END, "SUN": SUN, "DAY": DAY, "SUNDAY": SUNDAY, "X": X}
    return SimpleNamespace(**{name: globals()[name] for name in names}, **ids)
