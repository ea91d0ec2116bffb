"""Best-of-n filtering: of the n samples of a group only the best and the worst are trained on. Pure but for one sum.

Baselines and statistics see all n samples (the mean of all is what an answer of this policy is worth; the mean of the chosen is not): so the chosen
ones have the advantages that they would have without filtering. PODS (2504.13818) takes the statistics over the chosen ones instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rftcli.plan.plan_sampling import KeepPlan
from rftcli.protocols import World
from rftcli.types import Group


def chosen(group: Group, plan: KeepPlan) -> set[int]:
    """Indices of the samples that are trained on: the `best` of highest reward, the `worst` of lowest, no sample twice; of equals the lower
    index counts as better. Samples without a reward are not chosen, nor is a greedy twin; a group without any reward keeps its first sample, in which
    nothing is trained."""
    scored = [sample for sample in group.samples if sample.reward is not None and sample.completion.sample >= 0]
    order = [sample.completion.sample for sample in sorted(scored, key=lambda sample: (-(sample.reward or 0.0), sample.completion.sample))]
    if not order:
        return {0}
    best = order[: plan.best]
    rest = order[plan.best :]
    return {*best, *(rest[max(0, len(rest) - plan.worst) :] if plan.worst else ())}


def trained_samples(groups: Iterable[Group], plan: KeepPlan | None) -> frozenset[tuple[int, int]] | None:
    """(draw, sample) of what is trained on; None: everything."""
    if plan is None:
        return None
    return frozenset((group.prompt.draw, sample) for group in groups for sample in chosen(group, plan))


def kept_metrics(trained: frozenset[tuple[int, int]] | None, groups: Iterable[Group], world: World) -> Mapping[str, Any]:
    """`keep` of the step event: completions over all ranks. Collective where anything is filtered."""
    if trained is None:
        return {}
    sampled = sum(len(group.samples) for group in groups)
    kept, left = world.sum([len(trained), sampled - len(trained)])
    return {"keep": {"samples_trained": int(kept), "samples_left_out": int(left)}}
