"""How evenly a mixture of experts uses its experts: the balancing loss of Switch Transformer (arXiv:2101.03961), for each sequence.

Within a sequence, and not within a micro-batch, because then it does not depend on which sequences share a micro-batch or a rank (so DeepSeek-V3,
arXiv:2412.19437, section 2.1.2). What it leaves out: its coefficient, and the share each sequence has in the update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rftcli.errors import UsageError

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""How configurations call the number of experts."""
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_top_k", "top_k_experts")
"""How they call the number of experts a token goes through."""


def router_losses(config: PreTrainedConfig, router_logits: Sequence[Tensor] | None, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(num_sequences,) experts x sum over experts of (share of choices x mean probability), all layers together: 1 when all are used alike.

    `router_logits`: (B*S, experts) a layer. A row is a sequence where there is an `attention_mask`; else one begins where positions (B, S) restart.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if not router_logits:
        raise UsageError("models.policy.router_loss: the model does not give its router's scores", hint="leave the key out")
    text = config.get_text_config()
    experts, chosen = _number(text, EXPERTS), _number(text, CHOSEN)
    layers = [layer.reshape(-1, experts) for layer in router_logits]
    losses = []
    for positions in _sequences(position_ids, attention_mask):
        losses.append(load_balancing_loss_func(tuple(layer[positions] for layer in layers), experts, chosen))
    return torch.stack(losses)


def _sequences(position_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Flat indices into B*S of the real tokens of each sequence."""
    if attention_mask is not None:
        width = attention_mask.shape[1]
        return [row * width + mask.nonzero().flatten() for row, mask in enumerate(attention_mask)]
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero().flatten().tolist()
    return [torch.arange(start, end, device=flat.device) for start, end in zip(starts, [*starts[1:], flat.numel()], strict=True)]


def _number(config: PreTrainedConfig, names: Sequence[str]) -> int:
    found = [getattr(config, name) for name in names if getattr(config, name, None)]
    if not found:
        raise UsageError(f"models.policy.router_loss: the configuration has none of {', '.join(names)}", hint="leave the key out")
    return int(found[0])
