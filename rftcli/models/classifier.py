"""Reward models with a head: a transformers sequence classifier that scores whole texts, and texts as a scorer's own tokenizer reads them.

The score of a text does not depend on its company: rows are padded on the right and masked, and a family that looks for the last token that is not
padding gets a padding id that is in no text of the batch, where the checkpoint names none. What it leaves out: which texts (`runtime.scorers`), and
arithmetic over heads (`rewards.scorers.head`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rftcli.errors import UsageError
from rftcli.models.load import (
    _HUB_OPTIONS,
    DTYPES,
    _keep_packing,
    _readable_errors,
    _set_config_dropout,
    _set_module_dropout,
    _source,
    _unpacked,
)
from rftcli.types import Message


def load_classifier(
    path: str,
    *,
    dtype: str,
    options: Mapping[str, Any],
    trust_remote_code: bool,
    device: torch.device | str,
    revision: str | None = None,
    quantised: Any = None,
) -> PreTrainedModel:
    """The classifier in eval mode, frozen, without dropout. UsageError for what has no such class, and for a checkpoint without weights of a head: a
    new one would score at random."""
    source = _source(path, revision)
    few_bits = {} if quantised is None else {"quantization_config": quantised, "device_map": {"": torch.device(device)}}
    hub = {name: value for name, value in options.items() if name in _HUB_OPTIONS}
    changes = {name: value for name, value in options.items() if name not in _HUB_OPTIONS}
    with _readable_errors(path):
        config, rest = AutoConfig.from_pretrained(**source, **hub, **changes, trust_remote_code=trust_remote_code, return_unused_kwargs=True)
        _set_config_dropout(config, 0.0)
        if type(config) not in AutoModelForSequenceClassification._model_mapping and not trust_remote_code:
            raise UsageError(f"transformers has no sequence classifier for `{config.model_type}`", hint="use a judge: `kind: generative`")
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            **source,
            **_unpacked(source),
            **few_bits,
            **hub,
            **{name: rest[name] for name in changes if name in rest},
            config=config,
            dtype=DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    missing = sorted(loading["missing_keys"])
    if missing:
        hint = "a reward model has a head; a causal model can judge: `kind: generative`"
        raise UsageError(f"{path} has no weights for `{missing[0]}`: it would score at random", hint=hint)
    _set_module_dropout(model, 0.0)
    model = model.eval().requires_grad_(False)
    if quantised is None:
        return model.to(device)
    _keep_packing(model)
    return model


@torch.no_grad()
def heads(model: nn.Module, config: Any, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(R, H) float64 on the CPU: the outputs of the head for each row of ids (R rows, none empty). `model` may be wrapped; `config` is its own."""
    text = config.get_text_config()
    pad = text.pad_token_id if text.pad_token_id is not None else _absent(rows, text.vocab_size)
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad)  # (R, S)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    with _padded_by(text, pad):
        scores = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits  # (R, H)
    return scores.to("cpu", torch.float64).reshape(len(rows), -1)


@contextmanager
def _padded_by(config: Any, pad: int) -> Iterator[None]:
    before = config.pad_token_id
    config.pad_token_id = pad
    try:
        yield
    finally:
        config.pad_token_id = before


def _absent(rows: Sequence[Sequence[int]], vocabulary: int) -> int:
    """The largest id that is in none of the rows."""
    used = {token for row in rows for token in row}
    return next(token for token in range(vocabulary - 1, -1, -1) if token not in used)


class Texts:
    """What a scorer's own tokenizer makes of a conversation. `template` takes the place of the tokenizer's own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._template = template
        with_marks, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
        start = next((at for at in range(len(with_marks)) if with_marks[at : at + len(bare)] == bare), 0)
        self._front, self._back = tuple(with_marks[:start]), tuple(with_marks[start + len(bare) :])

    @property
    def has_template(self) -> bool:
        return self._template is not None or self.tokenizer.chat_template is not None

    @property
    def front(self) -> str:
        """What the tokenizer puts in front of a text, as text."""
        return self.tokenizer.decode(list(self._front))

    def rendered(self, turns: Sequence[Message], plain: str, *, opening: bool = False) -> str:
        """The turns by the chat template, or `plain` where there is none. `opening`: with the beginning of the answer that is to come. ValueError
        for what the template refuses."""
        if not self.has_template:
            return plain
        try:
            return str(self.tokenizer.apply_chat_template(
                [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=opening, chat_template=self._template
            ))  # fmt: skip
        except Exception as error:  # a template is a program from outside, and raises what it likes
            raise ValueError(f"the scorer's chat template fails: {type(error).__name__}: {error}") from error

    def ids(self, text: str, *, open_end: bool = False) -> list[int]:
        """Token ids with the tokenizer's marks in front of and behind the text exactly once; `open_end`: none behind."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        front = [] if tuple(found[: len(self._front)]) == self._front else list(self._front)
        back = [] if open_end or not self._back or tuple(found[-len(self._back) :]) == self._back else list(self._back)
        return [*front, *found, *back]

    def fitted(self, ids: list[int], most: int | None, *, cut: bool) -> tuple[list[int], bool]:
        """(ids of at most `most`, were they cut?): the beginning goes, the mark in front stays. ValueError where they are longer and stay whole."""
        if most is None or len(ids) <= most:
            return ids, False
        if not cut:
            raise ValueError(f"the text has {len(ids)} tokens, the scorer takes at most {most}")
        front = list(self._front) if tuple(ids[: len(self._front)]) == self._front else []
        return [*front, *ids[len(ids) - most + len(front) :]] if most > len(front) else ids[-most:], True


def max_positions(config: Any) -> int | None:
    """The longest text that a model was made for; None where its configuration does not say."""
    text = config.get_text_config()
    found = getattr(text, "max_position_embeddings", None)
    offset = text.pad_token_id + 1 if getattr(config, "model_type", "") in OFFSET_POSITIONS and text.pad_token_id is not None else 0
    return None if found is None else int(found) - offset


OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "longformer")
"""Families whose first position comes behind the padding id."""


@torch.no_grad()
def next_token_logits(model: nn.Module, rows: Sequence[Sequence[int]], device: torch.device, pad: int) -> Tensor:
    """(R, V) float64 on the CPU: the scores of the token behind each row of ids, padded on the left."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad)  # (R, S)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = torch.tensor(row)
        mask[index, width - len(row) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    output = model(input_ids=ids.to(device), attention_mask=mask.to(device), position_ids=positions.to(device), use_cache=False)
    return output.logits[:, -1].to("cpu", torch.float64)
