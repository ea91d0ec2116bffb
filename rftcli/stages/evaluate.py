"""Score a policy on held-out prompts: every row of every set, each set with its own samples, and nothing of the training run touched.

Draws of an evaluation are row numbers under a key of their own, so the same weights give the same answers at any step and on any rank count.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rftcli.algo import stats
from rftcli.algo.keyed import key64
from rftcli.plan.plan import Plan, RewardPlan
from rftcli.protocols import Sampler, Scorer, World
from rftcli.stages.collect import Tick, group_up, settings_of
from rftcli.stages.records import SampleRecord, length_metrics, part_metrics, records_of, sample_line
from rftcli.types import Prompt, Request

FULL_MARK_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    name: str
    prompts: Sequence[Prompt]
    """All prompts of the set, on every rank; `draw` is the row number."""
    samples_per_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    sets: Mapping[str, Mapping[str, Any]]
    """As in the eval event; the same on every rank."""
    lines: tuple[Mapping[str, Any], ...]
    """This rank's samples."""


def evaluate(sets: Sequence[EvalSet], sampler: Sampler, scorer: Scorer, plan: Plan, world: World, *, step: int, tick: Tick) -> Evaluation:
    results: dict[str, Mapping[str, Any]] = {}
    lines: list[Mapping[str, Any]] = []
    for item in sets:
        settings = replace(
            settings_of(plan.rollout, key64(plan.seed, "eval", item.name)),
            temperature=plan.eval.temperature,
            max_new_tokens=plan.eval.max_new_tokens,
            min_new_tokens=min(plan.rollout.min_new_tokens, plan.eval.max_new_tokens),
        )
        mine = [prompt for index, prompt in enumerate(item.prompts) if index % world.size == world.rank]
        requests = [Request(prompt=prompt, samples=tuple(range(item.samples_per_prompt))) for prompt in mine]
        total = len(mine) * item.samples_per_prompt

        def generate(requests: list[Request] = requests, settings: Any = settings, total: int = total) -> Any:
            for done, completion in enumerate(sampler.generate(requests, settings), start=1):
                tick("eval", done, total)
                yield completion

        groups = group_up(scorer.score(generate()), [prompt.draw for prompt in mine], item.samples_per_prompt)
        lines.extend({"set": item.name, **sample_line(sample, step=step, advantage=None)} for group in groups.values() for sample in group.samples)
        gathered = [entry for part in world.gather(records_of(groups.values())) for entry in part]
        gathered.sort(key=lambda entry: (entry.draw, entry.sample))
        results[item.name] = summarise(gathered, plan.rewards, item.samples_per_prompt, plan.eval.pass_k)
    return Evaluation(sets=results, lines=tuple(lines))


def summarise(records: Sequence[SampleRecord], rewards: RewardPlan, samples: int, pass_k: Sequence[int]) -> dict[str, Any]:
    """mean@n, best@n and pass@k with 95% intervals over prompts; counts; lengths. A completion passes when it reaches its label's full mark."""
    groups: dict[int, list[SampleRecord]] = defaultdict(list)
    for item in records:
        groups[item.draw].append(item)
    scored = {draw: [item.reward for item in members if item.reward is not None] for draw, members in groups.items()}
    scored = {draw: values for draw, values in scored.items() if values}
    summary: dict[str, Any] = {"prompts": len(groups), "prompts_scored": len(scored), "samples_per_prompt": samples}
    if scored:
        summary[f"mean@{samples}"] = _interval([statistics.fmean(values) for values in scored.values()])
        if samples > 1:
            summary[f"best@{samples}"] = _interval([max(values) for values in scored.values()])
        for k in pass_k:
            if k > samples:
                continue
            passed = []
            for draw, values in scored.items():
                full = _full_mark(rewards, groups[draw][0].label)
                if full is not None and len(values) >= k:
                    passed.append(stats.pass_at_k(len(values), sum(value >= full - FULL_MARK_TOLERANCE for value in values), k))
            if passed:
                summary[f"pass@{k}"] = _interval(passed)
    summary["reward_errors"] = sum(1 for item in records if item.reward is None)
    summary["parts"] = part_metrics(records)
    lengths = length_metrics(records)
    summary["response_tokens"] = lengths["response_tokens"]["mean"]
    summary["truncated_fraction"] = lengths["truncated_fraction"]
    return summary


def _interval(values: Sequence[float]) -> dict[str, float]:
    """The mean, with its interval where there is one: a single prompt has no spread."""
    mean, low, high = stats.mean_interval(values)
    return {"value": mean} if math.isnan(low) else {"value": mean, "low": low, "high": high}


def _full_mark(rewards: RewardPlan, label: str) -> float | None:
    """The best reward a label can give when every part says 1; None if nothing is rewarded."""
    parts = rewards.labels.get(label, rewards.labels.get("default", ()))
    total = sum(part.weight for part in parts if part.weight > 0)
    return total or None
