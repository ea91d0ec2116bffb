"""Credit beyond one number an answer: the KL term in the reward, advantages per token, whitening and clipping over the whole step.

Every statistic is over all ranks at once: local sums, one `world.sum`, then applied. Leaves out estimators (`algo`) and models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rftcli.algo import align
from rftcli.algo.advantages import ADVANTAGES, Advantage
from rftcli.algo.kl import KLS
from rftcli.algo.returns import token_rewards, white_completions, white_tokens
from rftcli.plan.plan import AdvantagePlan, KlPlan
from rftcli.protocols import World
from rftcli.types import Experience

Key = tuple[int, int]
"""(draw, sample)"""


@dataclass(slots=True, kw_only=True)
class KlPenalty:
    """What the KL term takes from rewards."""

    by_completion: dict[Key, float] = field(default_factory=dict)
    """Taken from the reward of an answer of any rank; empty at token level."""
    by_token: list[torch.Tensor] | None = None
    """(T,) a completion, in the order of the experiences; None above token level."""
    applied: float | None = None
    """The KL of the step, all ranks, as the level counts it: mean over tokens, or mean of sums over answers. None: no token was trained."""
    token_mean: float | None = None
    """The same KL as a mean over trained tokens."""


def key_of(experience: Experience) -> Key:
    completion = experience.sample.completion
    return completion.prompt.draw, completion.sample


def kl_penalty(experiences: Sequence[Experience], plan: KlPlan, coefficient: float, world: World) -> KlPenalty:
    """coefficient x KL of the rollout policy from the reference, at trained tokens. Collective."""
    estimate = KLS[plan.estimator].function
    kls = []
    for item in experiences:
        assert item.old_logprobs is not None and item.reference_logprobs is not None, "the KL in the reward reads both log-probs"
        kls.append(torch.where(item.mask, estimate(item.old_logprobs, item.reference_logprobs), 0.0).double())
    counts = [int(item.mask.sum()) for item in experiences]
    total, tokens, answers = world.sum([float(sum(kl.sum() for kl in kls)), sum(counts), sum(count > 0 for count in counts)])
    per = answers if plan.level == "sequence" else tokens
    applied, token_mean = (total / per, total / tokens) if tokens else (None, None)
    if plan.level == "token":
        return KlPenalty(by_token=[coefficient * kl for kl in kls], applied=applied, token_mean=token_mean)
    share = [1 if plan.level == "sequence" else max(1, count) for count in counts]
    mine = {key_of(item): coefficient * float(kl.sum()) / n for item, kl, n in zip(experiences, kls, share, strict=True)}
    taken = {key: value for part in world.gather(mine) for key, value in part.items()}  # another rank may have to do with a group's rewards
    return KlPenalty(by_completion=taken, applied=applied, token_mean=token_mean)


def token_advantages(experiences: Sequence[Experience], plan: AdvantagePlan, penalty: KlPenalty, rewards: Mapping[Key, float]) -> None:
    """Set `advantages`, and with a critic `returns`, of every experience from what its tokens have. Before whitening; no other rank is asked.
    `rewards`: of answers, after everything that is taken from a whole answer; one that is missing has none and trains no token."""
    if not experiences:
        return
    row: Advantage = ADVANTAGES[plan.kind]
    masks = [item.mask for item in experiences]
    sequence = torch.repeat_interleave(torch.arange(len(masks)), torch.tensor([int(mask.sum()) for mask in masks]))  # (N,)
    ends = torch.tensor([rewards.get(key_of(item), 0.0) for item in experiences], dtype=torch.float64)  # (C,)
    available = {
        "token_rewards": token_rewards(ends, sequence, None if penalty.by_token is None else align.flatten(penalty.by_token, masks)),
        "sequence": sequence,
        "bootstrap": torch.tensor([item.value_after for item in experiences], dtype=torch.float64),
        **{name: _flat(experiences, field) for name, field in TOKEN_FIELDS.items() if name in row.inputs},
    }
    if row.level == "token":
        found = row.function(*(available[name] for name in row.inputs), **plan.options)
    else:
        assert row.per_token is not None, f"{plan.kind} has no form per token"
        options = {name: value for name, value in plan.options.items() if name not in row.options}
        found = row.per_token(available["token_rewards"], sequence, **options)
    for item, advantages in zip(experiences, align.unflatten(found, masks), strict=True):
        item.advantages = advantages
        if item.values is not None:
            item.returns = torch.where(item.mask, advantages + item.values, 0.0)


TOKEN_FIELDS = {"values": "values", "old": "old_logprobs", "teacher": "teacher_logprobs"}
"""Input of an estimator -> field of an experience."""


def _flat(experiences: Sequence[Experience], field: str) -> torch.Tensor:
    """(N,) a field at the trained tokens."""
    vectors = [getattr(item, field) for item in experiences]
    assert all(vector is not None for vector in vectors), f"the plan fills {field} for this estimator"
    return align.flatten(vectors, [item.mask for item in experiences])


def whitened_over(plan: AdvantagePlan) -> str | None:
    """What the advantages of a step are whitened over: "tokens", "completions" or None."""
    row = ADVANTAGES[plan.kind]
    if plan.whiten == "off":
        return None
    return row.whiten or (None if plan.whiten == "with_signal" else "tokens" if plan.per_token else row.whiten_if_asked)


def only_with_signal(plan: AdvantagePlan) -> bool:
    """Whether groups without signal stay out of the moments, and at exactly 0. Only estimators that compare within a group have such groups."""
    return plan.whiten == "with_signal" and ADVANTAGES[plan.kind].baseline


def whiten_tokens(experiences: Sequence[Experience], world: World, *, with_signal: bool = False) -> None:
    """Advantages with mean 0 and population variance 1 over all trained tokens of all ranks; 0 where nothing is trained. `with_signal`: groups whose
    advantages are all 0 stay out of the moments and as they are. Collective."""
    signal = _draws_with_signal(experiences, world) if with_signal else set()
    counted = [item for item in experiences if not with_signal or item.sample.completion.prompt.draw in signal]
    trained = [item.advantages[item.mask].double() for item in counted]
    total, tokens = world.sum([float(sum(part.sum() for part in trained)), sum(part.numel() for part in trained)])
    mean = total / max(1.0, tokens)
    (squares,) = world.sum([float(sum((part - mean).square().sum() for part in trained))])
    for item in counted:
        item.advantages = torch.where(item.mask, white_tokens(item.advantages, mean=mean, variance=squares / max(1.0, tokens)), 0.0)


def _draws_with_signal(experiences: Sequence[Experience], world: World) -> set[int]:
    """Groups with an advantage other than 0 on any rank. Collective."""
    mine = {item.sample.completion.prompt.draw for item in experiences if bool(item.advantages[item.mask].any())}
    return set().union(*world.gather(mine))


def whiten_completions(values: torch.Tensor, group: torch.Tensor, *, with_signal: bool) -> torch.Tensor:
    """(C,) whitened over all scored completions of the step, or over those of groups with an advantage other than 0."""
    if not with_signal:
        return white_completions(values)
    counted = torch.isin(group, group[values != 0])
    found = torch.zeros_like(values, dtype=torch.float32)
    found[counted] = white_completions(values[counted])
    return found


def clip_tokens(experiences: Sequence[Experience], bound: float, world: World) -> float:
    """Advantages held within +-bound; the share of trained tokens that were outside, all ranks. Collective."""
    outside = [int(((item.advantages.abs() > bound) & item.mask).sum()) for item in experiences]
    beyond, tokens = world.sum([sum(outside), sum(int(item.mask.sum()) for item in experiences)])
    for item in experiences:
        item.advantages = item.advantages.clamp(-bound, bound)
    return beyond / max(1.0, tokens)


def completion_means(experiences: Sequence[Experience], world: World) -> dict[Key, float]:
    """(draw, sample) -> mean advantage of the trained tokens, of every completion with any, all ranks, in order. Collective."""
    mine = [(*key_of(item), float(item.advantages[item.mask].double().mean())) for item in experiences if bool(item.mask.any())]
    return {(draw, sample): value for draw, sample, value in sorted(entry for part in world.gather(mine) for entry in part)}


def value_metrics(experiences: Sequence[Experience], world: World) -> dict[str, float]:
    """Means of a critic's values and of returns over the trained tokens of all ranks. Collective."""
    sums = [float(sum(getattr(item, name)[item.mask].double().sum() for item in experiences)) for name in ("values", "returns")]
    values, returns, tokens = world.sum([*sums, sum(int(item.mask.sum()) for item in experiences)])
    return {"value_mean": values / tokens, "return_mean": returns / tokens} if tokens else {}
