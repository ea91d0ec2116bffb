"""Metrics of one evaluation set, from the small records of all its completions. Pure. docs/evaluation.md has every definition.

The unit is the prompt: a metric is a number for each prompt, then its mean over prompts with a 95% interval. A completion without a reward takes no
part; a metric of k or n completions leaves out prompts that have fewer scored ones.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rftcli.algo import stats
from rftcli.algo.votes import vote_at_k
from rftcli.plan.plan import RewardPlan
from rftcli.stages.records import SampleRecord, length_metrics, part_metrics, spread

FULL_MARK_TOLERANCE = 1e-6
Group = Sequence[SampleRecord]
"""The scored completions of one prompt."""


def summarise(
    records: Sequence[SampleRecord], rewards: RewardPlan, samples: int, pass_k: Sequence[int], vote_k: Sequence[int] = ()
) -> dict[str, Any]:
    """One set of the eval event. `samples`: completions asked for per prompt."""
    groups: dict[int, list[SampleRecord]] = defaultdict(list)
    for item in records:
        groups[item.draw].append(item)
    scored = [members for group in groups.values() if (members := [item for item in group if item.reward is not None])]
    summary: dict[str, Any] = {"prompts": len(groups), "prompts_scored": len(scored), "samples_per_prompt": samples}
    summary |= score_metrics(scored, rewards, samples, pass_k, vote_k)
    by_label: dict[str, list[Group]] = defaultdict(list)
    for group in scored:
        by_label[group[0].label].append(group)
    if len(by_label) > 1:
        summary["labels"] = {
            label: {"prompts_scored": len(own), **score_metrics(own, rewards, samples, pass_k, vote_k)} for label, own in sorted(by_label.items())
        }
    summary["reward_errors"] = sum(1 for item in records if item.reward is None)
    summary["parts"] = part_metrics(records)
    if records:
        lengths = length_metrics(records)
        summary["response_tokens"] = lengths["response_tokens"]["mean"]
        summary["truncated_fraction"] = lengths["truncated_fraction"]
    return summary


def score_metrics(groups: Sequence[Group], rewards: RewardPlan, samples: int, pass_k: Sequence[int], vote_k: Sequence[int]) -> dict[str, Any]:
    """mean@n, best@n, worst@n, std@n, pass@k and maj@k of some prompts. What no prompt has is absent."""
    per_prompt: dict[str, Callable[[Group], float | None]] = {f"mean@{samples}": lambda group: statistics.fmean(_rewards(group))}
    if samples > 1:
        whole = {"best": max, "worst": min, "std": spread}
        per_prompt |= {f"{name}@{samples}": _of_whole(function, samples) for name, function in whole.items()}
    per_prompt |= {f"pass@{k}": _pass_at(k, rewards) for k in pass_k if k <= samples}
    per_prompt |= {f"maj@{k}": _vote_at(k) for k in vote_k if k <= samples}
    found: dict[str, Any] = {}
    for name, metric in per_prompt.items():
        values = [value for group in groups if (value := metric(group)) is not None]
        if values:
            found[name] = _interval(values)
    return found


def _of_whole(function: Callable[[list[float]], float], samples: int) -> Callable[[Group], float | None]:
    """`function` of all n rewards of a prompt: the best of fewer would be too low."""
    return lambda group: function(_rewards(group)) if len(group) == samples else None


def _pass_at(k: int, rewards: RewardPlan) -> Callable[[Group], float | None]:
    def metric(group: Group) -> float | None:
        full = _full_mark(rewards, group[0].label)
        if full is None or len(group) < k:
            return None
        return stats.pass_at_k(len(group), sum(value >= full - FULL_MARK_TOLERANCE for value in _rewards(group)), k)

    return metric


def _vote_at(k: int) -> Callable[[Group], float | None]:
    def metric(group: Group) -> float | None:
        if len(group) < k or not group[0].votes:
            return None
        return vote_at_k([item.answer for item in group], _rewards(group), k)

    return metric


def _rewards(group: Group) -> list[float]:
    return [item.reward for item in group if item.reward is not None]


def _interval(values: Sequence[float]) -> Mapping[str, float]:
    """The mean, with its interval where there is one: a single prompt has no spread."""
    mean, low, high = stats.mean_interval(values)
    return {"value": mean} if math.isnan(low) else {"value": mean, "low": low, "high": high}


def _full_mark(rewards: RewardPlan, label: str) -> float | None:
    """The reward of a label when every part with a positive weight says 1 (or its upper bound); 1 where a function combines the parts; None if
    nothing is rewarded."""
    entry = label if label in rewards.labels else "default"
    how = rewards.combine[entry].how if entry in rewards.combine else "sum"
    best = [part.weight * (1.0 if part.clip is None else min(1.0, part.clip[1])) for part in rewards.labels.get(entry, ()) if part.weight]
    positive = [value for value in best if value > 0]
    if how == "python" or not best:
        return 1.0 if best else None
    found = {"sum": sum(positive), "product": math.prod(best), "min": min(best), "gate": sum(value for value in best[1:] if value > 0)}[how]
    return found if found > 0 else None
