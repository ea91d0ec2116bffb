"""Tiny real tokenizers, one per way of treating the beginning of a sequence, and files written byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rftcli.data.rows import Row

SPECIALS = ("<unk>", "<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>")
WORDS = ("a", "b", "c", "one", "two", "three", "rules", "hello", "there", "so", "w")


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """`front`, `behind`: special tokens that the tokenizer adds around a text. `kind`: words (split at blanks) or bytes (exact round trip)."""

    def make(*, kind: str = "words", front: str = "", behind: str = "", template: str | None = None) -> PreTrainedTokenizerFast:
        if kind == "words":
            vocab = {token: index for index, token in enumerate((*SPECIALS, *WORDS))}
            tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        else:
            vocab = {token: index for index, token in enumerate((*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
            tokenizer = Tokenizer(models.BPE(vocab, []))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(SPECIALS))
        if front or behind:
            names = [*front.split(), *behind.split()]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{front} $A {behind}".strip(), special_tokens=[(name, SPECIALS.index(name)) for name in names]
            )
        bos = "<s>" if "<s>" in front else None
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token=bos, eos_token="</s>", chat_template=template)

    return make


@pytest.fixture
def make_row() -> Callable[..., Row]:
    def make(prompt: Any, index: int = 0, source: str = "train", **changes: Any) -> Row:
        given = {"label": "math", "reference": None, "columns": {"prompt": prompt, "number": index}, **changes}
        return Row(source=source, index=index, place=f"{source}.jsonl:{index + 1}", id=f"{source}:{index}", prompt=prompt, **given)

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
