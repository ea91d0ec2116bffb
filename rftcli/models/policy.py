"""A causal language model that recomputes the log-probs of sampled tokens: the fast path of training.

The backbone runs once over padded or packed rows, hidden states are gathered where a trained token is predicted, and the head is applied to those
alone, a chunk at a time. Families whose head is more than a matrix (soft caps, scales) go through the model's own forward instead; `probe.agreement`
finds out which.

What it leaves out: losses, gradients' fate and devices. An engine such as DeepSpeed wraps this module: everything it does is one `forward`.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from rftcli.algo.logprobs import chunked_logprobs
from rftcli.models.attention import model_inputs
from rftcli.models.router import router_losses
from rftcli.models.scores import positions_at_once, reader
from rftcli.types import Batch

HEAD_BYTES = 256 * 2**20
"""Float32 scores held at a time, per copy; a chunk of the head has as many positions as fit."""

Head = Literal["chunked", "model"]
"""chunked: the bare head on gathered hidden states. model: the model's own forward, whatever it does to its scores."""


class CausalPolicy(nn.Module):
    """`protocols.Policy` over a transformers causal LM. `head` can be changed after the probe, before training starts.

    Packed rows (attention_mask None, positions that restart) attend inside their own sequence only: by the borders that `attention` passes down, or
    by a mask that transformers derives from the positions when there is no cache, with sdpa and eager attention.

    `balance`: each forward pass with gradients leaves `router_losses` (num_sequences,) behind, for a model whose router chooses experts.
    `entropy_gradient`: the entropy of a pass with gradients has one too.
    `compiled`: the backbone of this path goes through torch.compile, once for all shapes.
    `fused`: scores are read by kernels (`scores.kernels_work`); on all ranks or on none, since it decides how often a sharded head is called.
    """

    def __init__(
        self, model: PreTrainedModel, *, head: Head = "chunked", gradient_checkpointing: bool = False, balance: bool = False,
        compiled: bool = False, entropy_gradient: bool = False, fused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        # A method, not a module: an engine that samples from the same weights keeps the uncompiled one, and no parameter gets a second name.
        self._run_decoder = torch.compile(model.get_decoder().forward, dynamic=True) if compiled else None
        self.head: Head = head
        self.balances = balance
        self.entropy_gradient, self.fused = entropy_gradient, fused
        self.router_losses: Tensor | None = None
        self._keeps_logits = "logits_to_keep" in signature(model.forward).parameters
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        select: Tensor,
        target_ids: Tensor,
        temperature: float | Tensor,
        most_tokens: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """(log-probs (N,), entropy (N,) without gradient unless `entropy_gradient`), float32 nats, of `target_ids` (N,) under the scores at
        `select` (N,), flat indices into B*S, at the temperature, one for all or (N,). Without trained tokens (N = 0) the empty result still depends
        on every weight, so that ranks that have none take part in every collective of the backward pass. `most_tokens`: the largest N of any rank in
        this pass, so that all call a sharded head equally often."""
        nothing = select.numel() == 0
        if nothing:
            select, target_ids = select.new_zeros(1), target_ids.new_zeros(1)
            temperature = 1.0
        inputs = model_inputs(self.model, input_ids, position_ids, attention_mask)
        self.router_losses = None
        if self.balances and torch.is_grad_enabled():
            inputs["output_router_logits"] = True
        if self.head == "chunked":
            # the head is called as a module: a sharded engine gathers its weight in that call
            (features, outputs), score = self._hidden(inputs, select), self.model.get_output_embeddings()
        else:
            (features, outputs), score = self._scores(inputs, select), nn.Identity()
        if "output_router_logits" in inputs:
            self.router_losses = router_losses(self.model.config, outputs.get("router_logits"), position_ids, attention_mask)
        at_once = HEAD_BYTES * positions_at_once(features.dtype, self.fused)
        chunk = max(1, at_once // (4 * self.model.config.get_text_config().vocab_size))
        calls = max(1, -(-most_tokens // chunk))
        with_gradient = self.entropy_gradient and torch.is_grad_enabled()
        logprobs, entropy = chunked_logprobs(
            features, target_ids, score, temperature=temperature, chunk=chunk, calls=calls, entropy_gradient=with_gradient, read=reader(self.fused)
        )
        return (logprobs[:0], entropy[:0]) if nothing else (logprobs, entropy)

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """`forward` of a micro-batch."""
        return self(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            select=batch.select,
            target_ids=batch.target_ids,
            temperature=temperature if batch.temperatures is None else batch.temperatures,
            most_tokens=batch.most_tokens,
        )

    def _hidden(self, inputs: dict[str, Any], select: Tensor) -> tuple[Tensor, ModelOutput]:
        """(N, H) the backbone's last hidden states at `select`, and all that it gave."""
        decoder = self._run_decoder or self.model.get_decoder()
        outputs = decoder(**inputs)
        return outputs.last_hidden_state.flatten(0, 1).index_select(0, select), outputs  # of (B, S, H)

    def _scores(self, inputs: dict[str, Any], select: Tensor) -> tuple[Tensor, ModelOutput]:
        """(N, V) the model's own scores at `select`, and all that it gave; of the other columns none are computed where the model can leave them
        out."""
        width = inputs["input_ids"].shape[1]
        if not self._keeps_logits:
            outputs = self.model(**inputs)
            return outputs.logits.flatten(0, 1).index_select(0, select), outputs
        columns, place = torch.unique(select % width, return_inverse=True)
        outputs = self.model(**inputs, logits_to_keep=columns)
        return outputs.logits[select // width, place], outputs  # of (B, C, V)
