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
from rftcli.plan.plan import AdvantagePlan, Plan, RolloutPlan
from rftcli.plan.plan_sampling import one_temperature, temperatures
from rftcli.protocols import Policy, Roles, World
from rftcli.stages import batches
from rftcli.stages.collect import Collected
from rftcli.stages.correction import correct
from rftcli.stages.distill import add_teacher, teacher_metrics
from rftcli.stages.estimator_inputs import Estimator, estimator_inputs, scored_completions
from rftcli.stages.learn import passing_of
from rftcli.stages.partial import stale
from rftcli.stages.selection import CHOOSERS
from rftcli.stages.spread import spread
from rftcli.stages.token_credit import (
    Key,
    KlPenalty,
    clip_tokens,
    completion_means,
    key_of,
    kl_penalty,
    only_with_signal,
    token_advantages,
    value_metrics,
    whiten_completions,
    whiten_tokens,
    whitened_over,
)
from rftcli.stages.twins import twin_metrics
from rftcli.stages.values import fill_values
from rftcli.types import Experience, Group, ScoredSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """What this rank trains on, by mini-batch, and the advantage of every scored completion of the step on any rank."""

    mini_batches: tuple[tuple[Experience, ...], ...]
    advantages: dict[tuple[int, int], float]
    """(draw, sample) -> advantage, all ranks; where tokens have advantages of their own, their mean."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Of the step event: what only credit sees."""
    kl_applied: float | None = None
    """The KL that was taken from the rewards, as its level counts it; None where it is not in the reward."""


def credit(
    collected: Collected, roles: Roles, plan: Plan, world: World, *, pad_id: int, device: torch.device, kl_coefficient: float | None = None,
    estimator: Estimator | None = None,
) -> Credited:  # fmt: skip
    """`kl_coefficient` in force in this step; None: the plan's. `estimator`: the user's own, where the plan has one."""
    version = None if plan.rollout.partial is None else roles.policy.version
    mini_batches = tuple(
        tuple(_experience(sample, plan, version) for group in mini_batch for sample in group.samples if collected.trains(sample))
        for mini_batch in collected.mini_batches
    )
    load: Mapping[str, float] = {}
    late = plan.batch.needs_prepass is not None and _only_for_the_update(plan, roles)
    early = plan.batch.needs_prepass is not None and not late
    if early or any((roles.reference, roles.teacher, roles.critic)):
        mini_batches, load = spread(mini_batches, plan, world, only_with_effect=False)
    everything = [experience for mini_batch in mini_batches for experience in mini_batch]
    if early:
        _fill(everything, roles.policy, "old_logprobs", plan, world, pad_id=pad_id, device=device)
    corrected = correct(everything, plan.loss, world)
    for model, name in ((roles.reference, "reference_logprobs"), (roles.teacher, "teacher_logprobs")):
        if model is not None:
            _fill(everything, model, name, plan, world, pad_id=pad_id, device=device)
            model.sleep()
    if roles.critic is not None:
        fill_values(everything, roles.critic, plan, world, pad_id=pad_id, device=device)
    penalty = KlPenalty()
    if plan.kl is not None and plan.kl.in_reward:
        penalty = kl_penalty(everything, plan.kl, plan.kl.coefficient if kl_coefficient is None else kl_coefficient, world)
    advantages = _advantages(collected.groups, everything, plan.advantage, world, penalty, estimator)
    metrics: dict[str, Any] = {**corrected, **({} if roles.critic is None else value_metrics(everything, world))}
    if penalty.token_mean is not None:
        metrics["kl"] = penalty.token_mean
    if plan.rollout.greedy_twin:
        metrics |= twin_metrics(collected.groups, world)
    by_token = whitened_over(plan.advantage) == "tokens"
    if by_token:
        whiten_tokens(everything, world, with_signal=only_with_signal(plan.advantage))
    if plan.advantage.clip is not None:
        metrics["advantage_clip_fraction"] = clip_tokens(everything, plan.advantage.clip, world)
    if roles.teacher is not None:
        metrics |= teacher_metrics(everything, world)
    taught = plan.advantage.teacher_coefficient
    if taught is not None:
        add_teacher(everything, taught)
    if plan.advantage.per_token or by_token or plan.advantage.clip is not None or taught is not None:
        advantages = completion_means(everything, world)
    if roles.critic is None and (plan.batch.skip_zero_advantage or not load):
        mini_batches, last = spread(mini_batches, plan, world, only_with_effect=True)
        load = {**last, **{name: load[name] for name in load if name == "sampled"}}  # the first time they were where they were sampled
    if late:
        passing = [item for mini_batch in mini_batches for item in passing_of(mini_batch, plan, world)[0]]
        _fill(passing, roles.policy, "old_logprobs", plan, world, pad_id=pad_id, device=device)
    if load:
        metrics["rank_load"] = load
    return Credited(mini_batches=mini_batches, advantages=advantages, metrics=metrics, kl_applied=penalty.applied)


def _only_for_the_update(plan: Plan, roles: Roles) -> bool:
    """Whether nothing reads the log-probs at rollout time before the update does, so that what it leaves out (`learn.passing_of`) needs none."""
    loss = plan.loss
    before = loss.correction is not None or loss.top_entropy_share < 1.0 or loss.kind in CHOOSERS or (plan.kl is not None and plan.kl.in_reward)
    return plan.batch.skip_zero_advantage and not before and not any((roles.reference, roles.teacher, roles.critic))


def _advantages(
    groups: Sequence[Group], experiences: Sequence[Experience], plan: AdvantagePlan, world: World, penalty: KlPenalty, estimator: Estimator | None
) -> dict[Key, float]:
    """Set the advantages of this rank's experiences, before whitening over tokens. (draw, sample) -> advantage, where an answer has one. Collective.
    """
    if not plan.per_token:
        advantages = step_advantages(groups, plan, world, penalty.by_completion, estimator)
        for item in experiences:
            item.advantages = torch.full(item.mask.shape, advantages.get(key_of(item), 0.0), dtype=torch.float32)
        return advantages
    if ADVANTAGES[plan.kind].level == "token":
        scored = [(key_of(item), item.sample.reward) for item in experiences if item.sample.reward is not None]
        rewards = {key: reward - penalty.by_completion.get(key, 0.0) for key, reward in scored}
    else:  # what the estimator makes of an answer's reward stands at its last token
        rewards = _by_completion(groups, plan, world, penalty.by_completion, estimator)
    token_advantages(experiences, plan, penalty, rewards)
    return {}


def step_advantages(
    groups: Sequence[Group],
    plan: AdvantagePlan,
    world: World,
    penalties: Mapping[Key, float] = MappingProxyType({}),
    estimator: Estimator | None = None,
) -> dict[Key, float]:
    """(draw, sample) -> advantage of every scored completion of the step, the same on every rank; whitened if that is over completions. `penalties`:
    what is taken from this rank's rewards before any baseline. Collective."""
    found = _by_completion(groups, plan, world, penalties, estimator)
    if whitened_over(plan) != "completions" or not found:
        return found
    draws = torch.tensor([draw for draw, _ in found], dtype=torch.int64)
    white = whiten_completions(torch.tensor(list(found.values()), dtype=torch.float64), draws, with_signal=only_with_signal(plan))
    return dict(zip(found, white.float().tolist(), strict=True))


def _by_completion(
    groups: Sequence[Group], plan: AdvantagePlan, world: World, penalties: Mapping[Key, float], estimator: Estimator | None
) -> dict[Key, float]:
    """The estimator over all scored completions of the step, before whitening. Collective."""
    row = ADVANTAGES[plan.kind]
    scored = scored_completions(groups, world, penalties)
    if not scored:
        return {}
    options = plan.options if row.per_token is None else {name: plan.options[name] for name in row.options if name in plan.options}
    if plan.kind == "python":
        options = {}  # the user's function has them already
    values = row.function(*estimator_inputs(scored, row.inputs, world, estimator), **options)
    return {(item.draw, item.sample): value for item, value in zip(scored, values.tolist(), strict=True)}


def _experience(sample: ScoredSample, plan: Plan, version: int | None) -> Experience:
    """`version` of the policy now, where older weights may have sampled something; it is marked."""
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
        stale=None if version is None else torch.tensor(stale(completion.trace, version), dtype=torch.bool),
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
