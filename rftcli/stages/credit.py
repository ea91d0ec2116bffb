"""Scored groups to experiences: advantages over all completions of the step, and the log-probs that the plan says are needed before the update.

Completion-level advantages are computed from the rewards of all ranks in one fixed order, so they have the same bits on any number of ranks.
Leaves out the loss and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from rftcli.algo import align
from rftcli.algo.advantages import ADVANTAGES
from rftcli.algo.returns import white_completions
from rftcli.plan.plan import AdvantagePlan, Plan, RolloutPlan
from rftcli.plan.plan_sampling import one_temperature, temperatures
from rftcli.protocols import Policy, Roles, World
from rftcli.stages import batches
from rftcli.stages.collect import Collected
from rftcli.stages.correction import correct
from rftcli.stages.token_credit import (
    KlPenalty,
    clip_tokens,
    completion_means,
    key_of,
    kl_penalty,
    token_advantages,
    value_metrics,
    whiten_tokens,
    whitened_over,
)
from rftcli.stages.values import fill_values
from rftcli.types import Experience, Group, ScoredSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """This rank's experiences by mini-batch, and the advantage of every scored completion of the step on any rank."""

    mini_batches: tuple[tuple[Experience, ...], ...]
    advantages: dict[tuple[int, int], float]
    """(draw, sample) -> advantage, all ranks; where tokens have advantages of their own, their mean."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Of the step event: what only credit sees."""
    kl_applied: float | None = None
    """The KL that was taken from the rewards, as its level counts it; None where it is not in the reward."""


def credit(
    collected: Collected, roles: Roles, plan: Plan, world: World, *, pad_id: int, device: torch.device, kl_coefficient: float | None = None
) -> Credited:
    """`kl_coefficient` in force in this step; None: the plan's."""
    mini_batches = tuple(
        tuple(_experience(sample, plan) for group in mini_batch for sample in group.samples if collected.trains(sample))
        for mini_batch in collected.mini_batches
    )
    everything = [experience for mini_batch in mini_batches for experience in mini_batch]
    if plan.batch.needs_prepass is not None:
        _fill(everything, roles.policy, "old_logprobs", plan, world, pad_id=pad_id, device=device)
    corrected = correct(everything, plan.loss, world)
    if roles.reference is not None:
        _fill(everything, roles.reference, "reference_logprobs", plan, world, pad_id=pad_id, device=device)
        roles.reference.sleep()
    if roles.critic is not None:
        fill_values(everything, roles.critic, plan, world, pad_id=pad_id, device=device)
    penalty = KlPenalty()
    if plan.kl is not None and plan.kl.in_reward:
        penalty = kl_penalty(everything, plan.kl, plan.kl.coefficient if kl_coefficient is None else kl_coefficient, world)
    if plan.advantage.per_token:
        token_advantages(everything, plan.advantage, penalty)
    else:
        advantages = step_advantages(collected.groups, plan.advantage, world, penalty.by_completion)
        for experience in everything:
            experience.advantages = torch.full(experience.mask.shape, advantages.get(key_of(experience), 0.0), dtype=torch.float32)
    metrics: dict[str, Any] = {**corrected, **value_metrics(everything, world)}
    if penalty.token_mean is not None:
        metrics["kl"] = penalty.token_mean
    by_token = whitened_over(plan.advantage) == "tokens"
    if by_token:
        whiten_tokens(everything, world)
    if plan.advantage.clip is not None:
        metrics["advantage_clip_fraction"] = clip_tokens(everything, plan.advantage.clip, world)
    if plan.advantage.per_token or by_token or plan.advantage.clip is not None:
        advantages = completion_means(everything, world)
    return Credited(mini_batches=mini_batches, advantages=advantages, metrics=metrics, kl_applied=penalty.applied)


def step_advantages(
    groups: Sequence[Group], plan: AdvantagePlan, world: World, penalties: Mapping[tuple[int, int], float] = MappingProxyType({})
) -> dict[tuple[int, int], float]:
    """(draw, sample) -> advantage of every scored completion of the step, the same on every rank. `penalties`: what is taken from this rank's rewards
    before any baseline."""
    local = [
        (
            group.prompt.draw,
            sample.completion.sample,
            sample.reward - penalties.get((group.prompt.draw, sample.completion.sample), 0.0),
            len(sample.completion.trace.ids),
        )
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
    if whitened_over(plan) == "completions":
        values = white_completions(values)
    return {(draw, sample): float(value) for (draw, sample, _, _), value in zip(scored, values, strict=True)}


def _experience(sample: ScoredSample, plan: Plan) -> Experience:
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
        advantages=torch.zeros(length),
        sampler_logprobs=None if completion.trace.logprobs is None else torch.tensor(completion.trace.logprobs, dtype=torch.float32),
        temperatures=_temperatures(plan.rollout, completion.prompt.label, length),
    )


def _temperatures(rollout: RolloutPlan, label: str, length: int) -> torch.Tensor | None:
    """(T,) the temperature of each token of a completion; None where all tokens of the run have one."""
    first, rest = temperatures(rollout, label)
    if one_temperature(rollout):
        return None
    found = torch.full((length,), rest)
    found[:1] = first
    return found


def _fill(experiences: Sequence[Experience], policy: Policy, name: str, plan: Plan, world: World, *, pad_id: int, device: torch.device) -> None:
    """Set `name` of every experience to the log-probs under `policy`, micro-batch by micro-batch, without gradient.

    Every rank makes the same number of passes: under ZeRO-3 a pass is a collective.
    """
    experiences = batches.by_length(experiences, plan.batch)
    parts = batches.micro_batches(experiences, plan.batch, batches.NO_DENOMINATORS, world, pad_id=pad_id, device=device)
    row = 0
    for batch in parts:
        with torch.no_grad():
            logprobs, entropies = policy.logprobs(batch, plan.rollout.temperature)
        members = experiences[row : row + batch.num_sequences]  # none left for a filler
        row += len(members)
        for experience, values in zip(members, align.unflatten(logprobs.cpu(), [e.mask for e in members]), strict=True):
            setattr(experience, name, values)
        if name == "old_logprobs" and plan.loss.top_entropy_share < 1.0:
            for experience, values in zip(members, align.unflatten(entropies.cpu(), [e.mask for e in members]), strict=True):
                experience.entropies = values
