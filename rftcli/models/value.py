"""A critic: a transformers backbone with a head of one number a token, which `from_pretrained` loads again.

The class is transformers' token classification with one label. What it leaves out: losses, and how values become advantages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from rftcli.errors import UsageError
from rftcli.models import kernels as fused
from rftcli.models.attention import implementation, model_inputs
from rftcli.models.load import _HUB_OPTIONS, DTYPES, _readable_errors, _set_config_dropout, _set_module_dropout, _source, _unpacked
from rftcli.types import Batch

HEADS = ("score", "classifier")
"""What transformers' token classifiers call their head."""


AHEAD = 0.02
"""Part of the largest hidden number by which numbers of a token may differ with another token behind it: more than rounding in bfloat16."""


class ValueModel(nn.Module):
    """`protocols.Policy.values` over a token classifier with one label.

    Its forward takes what a policy's takes and gives (values (N,), zeros (N,)) instead of (log-probs, entropy): the value at the position that
    predicts a trained token is the value before that token. So a learner need not know which of the two it trains.
    """

    router_losses: Tensor | None = None
    """A critic's router is not balanced."""

    def __init__(self, model: PreTrainedModel, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.model = model
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        select: Tensor,
        target_ids: Tensor,
        temperature: float = 1.0,
        most_tokens: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """(values (N,), zeros (N,)), float32, at `select`. Without trained tokens the empty result still depends on every weight."""
        scores = self.model(**model_inputs(self.model, input_ids, position_ids, attention_mask)).logits  # (B, S, 1)
        values = scores[..., 0].float().flatten().index_select(0, select)  # (N,)
        if select.numel() == 0:
            values = scores.float().flatten()[:0] + 0.0 * scores.float().sum()
        return values, torch.zeros_like(values).detach()

    def values(self, batch: Batch) -> Tensor:
        """(N,) the value before each trained token."""
        found, _ = self(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            select=batch.select,
            target_ids=batch.target_ids,
        )
        return found


def load_value_model(
    path: str,
    *,
    head: str | None,
    dtype: str,
    attention: str,
    options: Mapping[str, Any],
    trust_remote_code: bool,
    device: torch.device | str,
    revision: str | None = None,
    kernels: str = "none",
) -> PreTrainedModel:
    """A token classifier with one label, in eval mode, on `device`, without dropout.

    A head that `path` does not have starts at 0: the first values are 0, on every rank alike. `head` is the name that the value head has among the
    weights of `path`, `revision` a commit of a hub id, `kernels` as for a causal model. Raises UsageError for what has no such class, or where `head`
    names no weights.
    """
    source = _source(path, revision)
    hub = {name: value for name, value in options.items() if name in _HUB_OPTIONS}
    changes = {name: value for name, value in options.items() if name not in _HUB_OPTIONS}
    with _readable_errors(path):
        config, rest = AutoConfig.from_pretrained(**source, **hub, **changes, trust_remote_code=trust_remote_code, return_unused_kwargs=True)
        if kernels == "liger":
            fused.switches(config)
        config.num_labels = 1
        config.classifier_dropout = 0.0
        config.token_classification_bias = True
        _set_config_dropout(config, 0.0)
        if type(config) not in AutoModelForTokenClassification._model_mapping and not trust_remote_code:
            raise UsageError(
                f"transformers has no value model for `{config.model_type}`",
                hint="use an estimator without a critic (grpo, rloo, reinforce), or give a critic of another family as `models.critic.from`",
            )
        model, loading = AutoModelForTokenClassification.from_pretrained(
            **source,
            **_unpacked(source),
            **hub,
            **{name: rest[name] for name in changes if name in rest},
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=implementation(attention),
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **({} if head is None else {"key_mapping": {rf"^{re.escape(head)}\.": "score."}}),
        )
    linear = _head(model)
    fresh = {name.rpartition(".")[2] for name in (*loading["missing_keys"], *(item[0] for item in loading["mismatched_keys"])) if _of_head(name)}
    if head is not None and "weight" in fresh:
        raise UsageError(f"models.critic.head: {path} has no weights `{head}.weight` of one number a token", hint="leave it out for a new head")
    with torch.no_grad():
        for name in fresh:
            getattr(linear, name).zero_()
    _set_module_dropout(model, 0.0)
    model.eval().to(device)
    if _looks_ahead(model):
        raise UsageError(f"{path} looks at the tokens behind the one that it values", hint="give a causal model as `models.critic.from`")
    if kernels == "liger":
        fused.apply(model)
    return model


@torch.no_grad()
def _looks_ahead(model: PreTrainedModel) -> bool:
    """Whether what is computed of a token changes with those behind it: such values know what they are to foretell, and padding."""
    attention = model.config._attn_implementation
    ids = torch.tensor([[3, 1, 2, 0], [3, 1, 2, 4]], device=next(model.parameters()).device) % model.config.get_text_config().vocab_size
    model.config._attn_implementation = "eager" if attention == "eager" else "sdpa"  # on a CPU too, and whatever packs later
    try:
        hidden = model.base_model(**model_inputs(model, ids, torch.arange(4).expand(2, 4), torch.ones_like(ids)))[0][:, :-1].float()
    finally:
        model.config._attn_implementation = attention
    return bool((hidden[0] - hidden[1]).abs().max() > AHEAD * hidden.abs().max())


def export_value_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, state_dict: Mapping[str, Tensor], directory: Path) -> None:
    """Weights in the loaded dtype, configuration and tokenizer: `AutoModelForTokenClassification.from_pretrained` loads them, and so does
    `models.critic.from`. `state_dict` holds full tensors by the model's own names."""
    own = dict(model.named_parameters())
    weights = {name: tensor.to(own[name].dtype).contiguous() for name, tensor in state_dict.items()}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in own}
    model.save_pretrained(directory, state_dict={**weights, **buffers})
    tokenizer.save_pretrained(directory)


def _of_head(name: str) -> bool:
    return name.split(".")[-2] in HEADS


def _head(model: PreTrainedModel) -> nn.Linear:
    found = [module for name, module in model.named_children() if name in HEADS and isinstance(module, nn.Linear)]
    if len(found) != 1:
        raise UsageError(f"{type(model).__name__} has no linear head `{'` or `'.join(HEADS)}`", hint="give a critic of another family")
    return found[0]
