"""A larger vocabulary: tokens are added to the tokenizer, and the embeddings grow with it.

What it leaves out: training the new rows (they are parameters like the others), and tokens that are special.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rftcli.errors import UsageError


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Add ordinary tokens, which a decoder shows. UsageError for one that the tokenizer has already."""
    known = tokenizer.get_vocab()
    for token in tokens:
        if token in known:
            raise UsageError(f"models.policy.add_tokens: the tokenizer has `{token}` already", hint="take it out of the list")
    tokenizer.add_tokens(list(tokens))


def grow_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Rows for every id of the tokenizer; models often have spare ones. New rows are drawn around the mean of the old ones, by a fixed key, so that
    every rank, the reference and a rollout's replica have the same."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= rows:
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer))


def check_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """UsageError when the tokenizer, of another model perhaps, has ids that the model has no rows for."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens, the model has embeddings for {rows}",
            hint="models.policy.tokenizer has to fit the model; models.policy.add_tokens makes the model's own vocabulary larger",
        )
