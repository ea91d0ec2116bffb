"""The critic's part of a step: values before the update, and the updates that bring them nearer to what answers were worth.

Leaves out the advantage that the values are for (`token_credit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rftcli.algo import align
from rftcli.algo.returns import value_loss
from rftcli.plan.plan import Plan
from rftcli.protocols import LossFunction, World
from rftcli.stages import batches
from rftcli.types import Batch, Denominators, Experience, FinishReason, Update


def fill_values(experiences: Sequence[Experience], critic: Any, plan: Plan, world: World, *, pad_id: int, device: torch.device) -> None:
    """Set `values` of every experience, without gradient, and where the plan asks for it `value_after` of those that were cut. Every rank makes the
    same number of passes."""
    experiences = batches.by_length(experiences, plan.batch)
    row = 0
    for batch in batches.micro_batches(experiences, plan.batch, batches.NO_DENOMINATORS, world, pad_id=pad_id, device=device):
        members = experiences[row : row + batch.num_sequences]  # none left for a filler
        row += len(members)
        asked = with_ends(batch, members) if plan.advantage.bootstrap_truncated else batch
        with torch.no_grad():
            values = critic.values(asked).float().cpu()
        trained = batch.target_ids.numel()
        for experience, found in zip(members, align.unflatten(values[:trained], [item.mask for item in members]), strict=True):
            experience.values = found
        if plan.advantage.bootstrap_truncated:
            for experience, after in zip(members, values[trained:].tolist(), strict=True):
                experience.value_after = after if experience.sample.completion.finish is FinishReason.LENGTH else 0.0


def with_ends(batch: Batch, members: Sequence[Experience]) -> Batch:
    """The batch, asked for one value more of each sequence: the one behind its last token."""
    assert batch.ends is not None
    ends = batch.ends[: len(members)]
    rows = torch.arange(len(members), device=ends.device)
    return replace(
        batch,
        select=torch.cat([batch.select, ends]),
        target_ids=torch.cat([batch.target_ids, torch.zeros_like(ends)]),
        sequence=torch.cat([batch.sequence, rows]),
    )


def critic_loss(value_clip: float | None) -> LossFunction:
    """The value loss, a mean over the trained tokens of the update."""

    def loss(values: torch.Tensor, _: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        assert batch.values is not None and batch.returns is not None, "a critic's batch has values and returns"
        total = value_loss(values, batch.values, batch.returns, clip=value_clip).sum() / batch.denominators.tokens
        return total, {"value_loss": total.detach()}

    return loss


def critic_update(experiences: Sequence[Experience], critic: Any, plan: Plan, world: World, *, pad_id: int, device: torch.device) -> Update:
    """One optimizer update of the critic from this rank's share of a mini-batch."""
    assert plan.critic is not None
    local = batches.count(experiences)
    tokens, sequences = (int(value) for value in world.sum([local.tokens, local.sequences]))
    if tokens == 0:
        return Update(applied=False, policy_version=critic.version, lr=critic.lr, grad_norm=None, metrics={}, tokens=0, role="critic")
    loss = critic_loss(plan.critic.value_clip)
    denominators = Denominators(tokens=tokens, sequences=sequences)
    experiences = batches.by_length(experiences, plan.batch)
    parts = batches.micro_batches(experiences, plan.batch, denominators, world, pad_id=pad_id, device=device)
    total = 0.0
    for index, batch in enumerate(parts):
        total += float(critic.backward(batch, loss, last=index == len(parts) - 1)["value_loss"])
    outcome = critic.step()
    (total,) = world.sum([total])
    return Update(
        applied=outcome.applied, policy_version=critic.version, lr=outcome.lr, grad_norm=outcome.grad_norm, metrics={"value_loss": total},
        tokens=tokens, role="critic",
    )  # fmt: skip
