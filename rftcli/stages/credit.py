"""Scored groups to experiences: advantages over all completions of the step, and the log-probs that the plan says are needed before the update.

Completion-level advantages are computed from the rewards of all ranks in one fixed order, so they have the same bits on any number of ranks.
Leaves out the loss and the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rftcli.algo import align
from rftcli.algo.advantages import ADVANTAGES
from rftcli.plan.plan import AdvantagePlan, Plan
from rftcli.protocols import Policy, Roles, World
from rftcli.stages import batches
from rftcli.stages.collect import Collected
from rftcli.types import Experience, Group, ScoredSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """This rank's experiences by mini-batch, and the advantage of every scored completion of the step on any rank."""

    mini_batches: tuple[tuple[Experience, ...], ...]
    advantages: dict[tuple[int, int], float]
    """(draw, sample) -> advantage, all ranks."""


def credit(collected: Collected, roles: Roles, plan: Plan, world: World, *, pad_id: int, device: torch.device) -> Credited:
    advantages = step_advantages(collected.groups, plan.advantage, world)
    mini_batches = tuple(
        tuple(_experience(sample, advantages.get((group.prompt.draw, sample.completion.sample))) for group in mini_batch for sample in group.samples)
        for mini_batch in collected.mini_batches
    )
    everything = [experience for mini_batch in mini_batches for experience in mini_batch]
    if plan.batch.needs_prepass is not None:
        _fill(everything, roles.policy, "old_logprobs", plan, world, pad_id=pad_id, device=device)
    if roles.reference is not None:
        _fill(everything, roles.reference, "reference_logprobs", plan, world, pad_id=pad_id, device=device)
        roles.reference.sleep()
    return Credited(mini_batches=mini_batches, advantages=advantages)


def step_advantages(groups: Sequence[Group], plan: AdvantagePlan, world: World) -> dict[tuple[int, int], float]:
    """(draw, sample) -> advantage of every scored completion of the step, the same on every rank."""
    local = [
        (group.prompt.draw, sample.completion.sample, sample.reward, len(sample.completion.trace.ids))
        for group in groups
        for sample in group.samples
        if sample.reward is not None
    ]
    scored = sorted(item for part in world.gather(local) for item in part)
    if not scored:
        return {}
    row = ADVANTAGES[plan.kind]
    available: dict[str, Any] = {
        "rewards": torch.tensor([reward for _, _, reward, _ in scored], dtype=torch.float64),
        "group": torch.tensor([draw for draw, _, _, _ in scored], dtype=torch.int64),
        "lengths": torch.tensor([length for _, _, _, length in scored], dtype=torch.int64),
    }
    values = row.function(*(available[name] for name in row.inputs), **plan.options)
    return {(draw, sample): float(value) for (draw, sample, _, _), value in zip(scored, values, strict=True)}


def _experience(sample: ScoredSample, advantage: float | None) -> Experience:
    completion = sample.completion
    length = len(completion.trace.ids)
    trained = torch.ones(length, dtype=torch.bool) if completion.trace.mask is None else torch.tensor(completion.trace.mask, dtype=torch.bool)
    if sample.reward is None:
        trained = torch.zeros_like(trained)
    return Experience(
        sample=sample,
        token_ids=torch.tensor(completion.prompt.token_ids + completion.trace.ids, dtype=torch.int64),
        prompt_tokens=len(completion.prompt.token_ids),
        mask=trained,
        advantages=torch.full((length,), advantage or 0.0, dtype=torch.float32),
        sampler_logprobs=None if completion.trace.logprobs is None else torch.tensor(completion.trace.logprobs, dtype=torch.float32),
    )


def _fill(experiences: Sequence[Experience], policy: Policy, name: str, plan: Plan, world: World, *, pad_id: int, device: torch.device) -> None:
    """Set `name` of every experience to the log-probs under `policy`, micro-batch by micro-batch, without gradient.

    Every rank makes the same number of passes: under ZeRO-3 a pass is a collective.
    """
    parts = batches.micro_batches(experiences, plan.batch, batches.NO_DENOMINATORS, world, pad_id=pad_id, device=device)
    row = 0
    for batch in parts:
        with torch.no_grad():
            logprobs, _ = policy.logprobs(batch, plan.rollout.temperature)
        members = experiences[row : row + batch.num_sequences]  # none left for a filler
        row += len(members)
        for experience, values in zip(members, align.unflatten(logprobs.cpu(), [e.mask for e in members]), strict=True):
            setattr(experience, name, values)
