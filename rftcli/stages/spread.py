"""Completions go to the rank that has least to do before they pass through a model. Which rank computes a row changes no number of the update: every
denominator and statistic is over all ranks.

Leaves out who gets what (`algo.balance`), and what a group's advantages are made of: rewards, which every rank hears of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rftcli.algo.balance import fair_shares, fullest
from rftcli.plan.plan import BatchPlan, Plan
from rftcli.protocols import World
from rftcli.stages import batches
from rftcli.types import Experience, ScoredSample, TokenTrace

MiniBatches = tuple[tuple[Experience, ...], ...]


def has_effect(experience: Experience, plan: BatchPlan) -> bool:
    """Whether the policy's update would be another one without this completion, apart from denominators."""
    return not plan.skip_zero_advantage or bool(experience.advantages[experience.mask].any())


def cost(members: Sequence[Experience], plan: BatchPlan) -> float:
    """Work of completions that stay together, in tokens without attention: the prompt once if it is shared, and attention over all before a token."""
    lengths = [len(item.token_ids) for item in members]
    again = sum(item.prompt_tokens for item in members[1:]) if plan.share_prompts else 0
    return sum(lengths) - again + plan.attention_cost * sum(length * length for length in lengths)


def spread(mini_batches: MiniBatches, plan: Plan, world: World, *, only_with_effect: bool) -> tuple[MiniBatches, Mapping[str, float]]:
    """This rank's completions of each mini-batch after they have been shared out anew, and `rank_load` of the step event; nothing with one rank. A
    mini-batch keeps its completions, and a group whose prompt is shared stays together. `only_with_effect`: what the policy's update leaves out costs
    nothing (`learn.passing_of`: where nothing has an effect, everything passes). Collective."""
    if world.size == 1 or not plan.batch.balance:
        return mini_batches, {}
    mine = [_together(mini_batch, plan.batch) for mini_batch in mini_batches]
    passing = _cost_with_effect if only_with_effect else cost
    told = [[(cost(members, plan.batch), passing(members, plan.batch)) for members in units] for units in mine]
    parcels: list[list[list[Experience]]] = [[[] for _ in mine] for _ in range(world.size)]
    before = after = even = 0.0
    moved = False
    for number, by_rank in enumerate(zip(*world.gather(told), strict=True)):
        every, costs = ([pair[which] for part in by_rank for pair in part] for which in (0, 1))
        costs = costs if any(costs) else every
        homes = [rank for rank, part in enumerate(by_rank) for _ in part]
        places = fair_shares(costs, homes, world.size)
        moved = moved or places != homes
        first = sum(len(part) for part in by_rank[: world.rank])
        for members, place in zip(mine[number], places[first:], strict=False):  # the others' come behind
            parcels[place][number].extend(members if place == world.rank else map(light, members))
        before, after = before + fullest(costs, homes, world.size), after + fullest(costs, places, world.size)
        even += sum(costs) / world.size
    load = {"sampled": before / even, "trained": after / even} if even else {}
    if not moved:
        return mini_batches, load
    arrived = world.exchange(parcels)
    return tuple(tuple(item for part in arrived for item in part[number]) for number in range(len(mine))), load


def light(item: Experience) -> Experience:
    """As it travels: the tensors, and of the sample who it is, its reward and how it ended. Words, and what data and rewards attached to them, stay
    with the rank that writes them down: they may be large, or objects that cannot travel."""
    sample = item.sample
    prompt = replace(sample.completion.prompt, text="", token_ids=(), messages=(), prefill="", reference=None, columns={})
    completion = replace(sample.completion, prompt=prompt, text="", text_with_special="", trace=TokenTrace(ids=()))
    return replace(item, sample=ScoredSample(completion=completion, parts=(), reward=sample.reward))


def _together(experiences: Sequence[Experience], plan: BatchPlan) -> list[list[Experience]]:
    """What may not be parted: groups whose prompt is shared, else single completions."""
    if not plan.share_prompts:
        return [[item] for item in experiences]
    groups: dict[object, list[Experience]] = {}
    for item in experiences:
        groups.setdefault(batches.group_of(item), []).append(item)
    return list(groups.values())


def _cost_with_effect(members: Sequence[Experience], plan: BatchPlan) -> float:
    return cost([item for item in members if has_effect(item, plan)], plan)
