"""Rewards of a training step, shaped: penalties for length and ending, running normalisation, bounds. Groups in, the same groups out.

In this order (docs/rewards.md): truncated answers, missing end, overlong penalty, running normalisation, clip; KL in the reward comes later, in
credit. Evaluation never comes here. Every rank shapes its own groups; the moments are of all ranks' rewards, in one fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rftcli.algo.shaping import clipped, normalised, overlong_penalty, truncated_reward
from rftcli.algo.stats import Moments
from rftcli.plan.plan import ShapingPlan
from rftcli.protocols import World
from rftcli.stages.collect import Collected
from rftcli.stages.twins import with_twin_apart
from rftcli.types import FinishReason, Group, ScoredSample, Shaped


class RunningNorm:
    """Population moments of all training rewards so far. Remembers; part of a checkpoint."""

    def __init__(self) -> None:
        self.moments = Moments()

    def state_dict(self) -> Mapping[str, Any]:
        return {"count": self.moments.count, "mean": self.moments.mean, "squares": self.moments.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moments = Moments(count=int(state["count"]), mean=float(state["mean"]), squares=float(state["squares"]))


def shape(collected: Collected, plan: ShapingPlan, running: RunningNorm, world: World) -> Collected:
    """`running` is brought up to date with this step's rewards first, then used on them. Collective where rewards are normalised."""
    if not plan.active:
        return collected
    mini_batches = [[_map(group, lambda sample: penalised(sample, plan)) for group in part] for part in collected.mini_batches]
    if plan.running_norm != "off":
        _take_in(running, [group for part in mini_batches for group in part], world)
    finished = tuple(tuple(_map(group, lambda sample: scaled(sample, plan, running.moments)) for group in part) for part in mini_batches)
    return replace(collected, mini_batches=finished)


def penalised(sample: ScoredSample, plan: ShapingPlan) -> ScoredSample:
    """Up to the running normalisation. A sample without a reward stays as it is."""
    if sample.reward is None:
        return sample
    completion, reward = sample.completion, sample.reward
    truncated = completion.finish is FinishReason.LENGTH
    if truncated and plan.truncated == "mask":
        return replace(sample, reward=None, shaped=Shaped(combined=reward, masked=True))
    shaped = truncated_reward(reward, plan.truncated_factor) if truncated and plan.truncated == "penalise" else reward
    if completion.finish is not FinishReason.STOP:
        shaped -= plan.missing_eos_penalty
    overlong = 0.0
    if plan.overlong_buffer is not None:
        limit = plan.limits.get(completion.prompt.label, plan.max_new_tokens)
        overlong = plan.overlong_factor * overlong_penalty(len(completion.trace.ids), limit, plan.overlong_buffer)
    shaped += overlong
    return replace(sample, reward=shaped, shaped=Shaped(combined=reward, penalty=shaped - reward, overlong=overlong))


def scaled(sample: ScoredSample, plan: ShapingPlan, moments: Moments) -> ScoredSample:
    """Running normalisation and bounds."""
    if sample.reward is None or sample.shaped is None:
        return sample
    reward = sample.reward
    if plan.running_norm != "off":
        reward = normalised(reward, moments.mean, moments.population_std, centre=plan.running_norm == "full")
    bounded = reward if plan.clip is None else clipped(reward, *plan.clip)
    return replace(sample, reward=bounded, shaped=replace(sample.shaped, clipped=bounded != reward))


def _take_in(running: RunningNorm, groups: list[Group], world: World) -> None:
    local = [
        (group.prompt.draw, sample.completion.sample, sample.reward)
        for group in groups
        for sample in group.samples
        if sample.reward is not None  # a greedy twin is none of them
    ]
    everywhere = sorted(item for part in world.gather(local) for item in part)
    running.moments = running.moments.merge(Moments.of(reward for _, _, reward in everywhere))


def _map(group: Group, change: Any) -> Group:
    """The group with each sample changed, its greedy twin too: a baseline is shaped like what it is compared with."""
    twin = () if group.greedy is None else (change(group.greedy),)
    return with_twin_apart(replace(group, samples=(*(change(sample) for sample in group.samples), *twin), greedy=None))
