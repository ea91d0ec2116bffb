"""Greedy twins (ReMax): one more completion of each prompt, the likeliest one, scored by the same rewards as a baseline.

It is sample -1, which every engine samples greedily whatever the temperature, so its key and its tokens do not depend on the others and are the same
after a resume. It is no part of a group's samples: it is never trained on and counts in no metric of trained completions.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from rftcli.plan.plan import Plan
from rftcli.protocols import World
from rftcli.types import Group, ScoredSample

GREEDY = -1
"""Sample index of a twin."""


def asked_samples(plan: Plan) -> tuple[int, ...]:
    """Sample indices of a prompt that the engine is asked for."""
    trained = tuple(range(plan.batch.samples_per_prompt))
    return (*trained, GREEDY) if plan.rollout.greedy_twin else trained


def with_twin_apart(group: Group) -> Group:
    """The group with its twin, if it has one, in a field of its own. If the twin could not be scored, neither is the group: there is nothing to
    compare with."""
    twin = next((sample for sample in group.samples if sample.completion.sample == GREEDY), None)
    if twin is None:
        return group
    trained = tuple(sample for sample in group.samples if sample.completion.sample != GREEDY)
    if twin.reward is None:
        why = None if twin.shaped is not None else f"its greedy twin could not be scored: {_why(twin)}"
        trained = tuple(replace(sample, reward=None, error=sample.error or (why if sample.reward is not None else None)) for sample in trained)
    return Group(prompt=group.prompt, samples=trained, greedy=twin)


def _why(twin: ScoredSample) -> str:
    told = [f"{part.name}: {part.error}" for part in twin.parts if part.error is not None and part.weight]
    return next(iter([*told, *([] if twin.error is None else [twin.error])]), "every part with a weight abstained (returned None)")


def twin_metrics(groups: Iterable[Group], world: World) -> dict[str, float]:
    """Of the step event: mean reward of the twins of all ranks, and how many could not be scored. Collective."""
    mine = [(group.prompt.draw, group.greedy.reward) for group in groups if group.greedy is not None]
    rewards = [reward for _, reward in sorted((item for part in world.gather(mine) for item in part), key=lambda item: item[0])]
    scored = [reward for reward in rewards if reward is not None]
    return {**({"greedy_reward_mean": statistics.fmean(scored)} if scored else {}), "greedy_dropped": float(len(rewards) - len(scored))}
