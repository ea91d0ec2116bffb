"""Small plain records of a step's completions, and the step metrics made from all ranks' records. Pure.

Every statistic is taken over the completions of all ranks at once: no means of means. Leaves out what the update measures.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftcli.types import FinishReason, Group, PartScore, ScoredSample, Shaped

FLAT_SPREAD = 1e-6
"""A group whose rewards differ by less, relative to their size, has no signal (the advantage estimators use the same rule)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One completion, small enough to be sent between ranks."""

    draw: int
    sample: int
    label: str
    reward: float | None
    parts: tuple[PartScore, ...]
    tokens: int
    prompt_tokens: int
    finish: FinishReason
    answer: str | None = None
    """What it answers, for votes; None: nothing, or it does not vote."""
    votes: bool = False
    """Whether completions of its label vote."""
    shaped: Shaped | None = None
    error: str | None = None
    """Why its parts could not be combined."""
    metrics: tuple[tuple[str, float], ...] = ()
    """What reward functions measured."""

    @property
    def combined(self) -> float | None:
        """The reward of its parts, before shaping."""
        return self.reward if self.shaped is None else self.shaped.combined


def record(sample: ScoredSample, *, answer: str | None = None, votes: bool = False) -> SampleRecord:
    completion = sample.completion
    return SampleRecord(
        draw=completion.prompt.draw,
        sample=completion.sample,
        label=completion.prompt.label,
        reward=sample.reward,
        parts=sample.parts,
        tokens=len(completion.trace.ids),
        prompt_tokens=len(completion.prompt.token_ids),
        finish=completion.finish,
        answer=answer,
        votes=votes,
        shaped=sample.shaped,
        error=sample.error,
        metrics=sample.metrics,
    )


def records_of(groups: Iterable[Group]) -> list[SampleRecord]:
    return [record(sample) for group in groups for sample in group.samples]


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); 0 for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def reward_metrics(records: Sequence[SampleRecord]) -> dict[str, Any]:
    """reward_mean ... user of the step event, over all completions of all ranks. Rewards are those of the parts, before shaping; what shaping did
    has names of its own, and zero_signal_fraction counts what the advantage sees. With one completion a prompt it is absent: there are no groups."""
    rewards = [item.combined for item in records if item.combined is not None]
    groups: dict[int, list[float]] = defaultdict(list)
    combined: dict[int, list[float]] = defaultdict(list)
    for item in records:
        members = groups[item.draw]
        if item.reward is not None:
            members.append(item.reward)
        if item.combined is not None:
            combined[item.draw].append(item.combined)
    metrics: dict[str, Any] = {
        "groups": len(groups),
        "group_size": group_size([len(members) for members in groups.values()]),
        "reward_errors": sum(1 for item in records if item.error is not None or any(part.error is not None for part in item.parts)),
        "samples_dropped": len(records) - len(rewards),
        "reward_parts": part_metrics(records),
    }
    if len(records) > len(groups):
        metrics["zero_signal_fraction"] = sum(1 for members in groups.values() if not has_spread(members)) / len(groups)
    if rewards:
        metrics["reward_mean"] = statistics.fmean(rewards)
        metrics["reward_std"] = spread(rewards)
        metrics["reward_min"], metrics["reward_max"] = min(rewards), max(rewards)
    spreads = [spread(members) for members in combined.values() if len(members) > 1]
    if spreads:
        metrics["group_reward_std"] = statistics.fmean(spreads)
    labels: dict[str, list[float]] = defaultdict(list)
    for item in records:
        if item.combined is not None:
            labels[item.label].append(item.combined)
    metrics["labels"] = {label: statistics.fmean(values) for label, values in sorted(labels.items())}
    return metrics | shaping_metrics(records) | user_metrics(records)


def shaping_metrics(records: Sequence[SampleRecord]) -> dict[str, float]:
    """What shaping did to the rewards that are trained on; nothing where it did not run."""
    shaped = [item.shaped for item in records if item.shaped is not None]
    if not shaped:
        return {}
    metrics: dict[str, float] = {"samples_masked": sum(item.masked for item in shaped)}
    kept = [item for item in shaped if not item.masked]
    rewards = [item.reward for item in records if item.reward is not None]
    if kept:
        metrics["shaped_reward_mean"], metrics["shaped_reward_std"] = statistics.fmean(rewards), spread(rewards)
        metrics["reward_clip_fraction"] = sum(item.clipped for item in kept) / len(kept)
        metrics["overlong_penalty_mean"] = statistics.fmean(item.overlong for item in kept)
    return metrics


def group_size(scored: Sequence[int]) -> dict[str, float]:
    """Scored completions of a group: what a baseline was made of."""
    return {"mean": statistics.fmean(scored), "min": min(scored), "max": max(scored)} if scored else {}


def user_metrics(records: Sequence[SampleRecord]) -> dict[str, dict[str, float]]:
    """`user`: name -> mean over all values that reward functions logged under it, on any rank."""
    values: dict[str, list[float]] = defaultdict(list)
    for item in records:
        for name, value in item.metrics:
            values[name].append(value)
    return {"user": {name: statistics.fmean(found) for name, found in sorted(values.items())}} if values else {}


def uneven_groups(records: Sequence[SampleRecord]) -> dict[str, int]:
    """Part -> number of groups in which it abstained on some completions and scored others: their rewards are sums of different things. A name that
    a function returned for some and left out for others counts alike; a completion with an error says nothing of what is missing."""
    scored: dict[tuple[str, int], set[bool]] = defaultdict(set)
    whole: dict[int, list[set[str]]] = defaultdict(list)
    for item in records:
        for part in item.parts:
            if part.weight and part.error is None:
                scored[(part.name, item.draw)].add(part.value is not None)
        if all(part.error is None for part in item.parts):
            whole[item.draw].append({part.name for part in item.parts})
    counts: dict[str, int] = defaultdict(int)
    for (name, draw), kinds in scored.items():
        counts[name] += len(kinds) == 2 or (True in kinds and any(name not in names for names in whole[draw]))
    return {name: count for name, count in sorted(counts.items()) if count}


def has_spread(values: Sequence[float]) -> bool:
    """At least two values, and not all alike."""
    return len(values) > 1 and max(values) - min(values) >= FLAT_SPREAD * max(1.0, max(abs(value) for value in values))


def part_metrics(records: Sequence[SampleRecord]) -> dict[str, dict[str, float]]:
    """Part name -> mean and std over the completions it scored, how often it failed, and in how many groups it abstained on some only."""
    values: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, int] = defaultdict(int)
    uneven = uneven_groups(records)
    for item in records:
        for part in item.parts:
            errors[part.name] += part.error is not None
            if part.value is not None:
                values[part.name].append(part.value)
    found = {}
    for name in sorted(errors):
        scored = values[name]
        found[name] = {"mean": statistics.fmean(scored), "std": spread(scored), "errors": errors[name]} if scored else {"errors": errors[name]}
        if name in uneven:
            found[name]["uneven_groups"] = uneven[name]
    return found


def length_metrics(records: Sequence[SampleRecord]) -> dict[str, Any]:
    lengths = [item.tokens for item in records]
    finished = [item.tokens for item in records if item.finish is FinishReason.STOP]
    tokens: dict[str, float] = {"mean": statistics.fmean(lengths), "min": min(lengths), "max": max(lengths)}
    if finished:
        tokens |= {"terminated_mean": statistics.fmean(finished), "terminated_min": min(finished), "terminated_max": max(finished)}
    return {
        "response_tokens": tokens,
        "prompt_tokens_mean": statistics.fmean(item.prompt_tokens for item in records),
        "truncated_fraction": sum(1 for item in records if item.finish is FinishReason.LENGTH) / len(records),
        "tokens": sum(item.tokens + item.prompt_tokens for item in records),
    }


def sample_line(sample: ScoredSample, *, step: int, advantage: float | None) -> Mapping[str, Any]:
    """One line of samples/step_N.jsonl."""
    completion = sample.completion
    prompt = completion.prompt
    return {
        "draw": prompt.draw,
        "sample": completion.sample,
        "prompt_id": prompt.row_id,
        "label": prompt.label,
        "step": step,
        "prompt": prompt.text,
        "completion": completion.text_with_special,
        "reference": prompt.reference,
        "parts": {part.name: {"value": part.value, "weight": part.weight, **({"error": part.error} if part.error else {})} for part in sample.parts},
        "reward": sample.reward,
        "advantage": advantage,
        "tokens": len(completion.trace.ids),
        "finish": completion.finish.value,
        "policy_version": completion.policy_version,
        "media": list(prompt.media),
        **_more(sample),
    }


def _more(sample: ScoredSample) -> dict[str, Any]:
    """What only some lines have: special tokens at the end, what shaping did, what reward functions logged."""
    completion = sample.completion
    found: dict[str, Any] = {}
    if completion.text_with_special != completion.text:
        ends = completion.text_with_special.startswith(completion.text)
        found |= {"special_end": completion.text_with_special[len(completion.text) :]} if ends else {"text": completion.text}
    if len(completion.trace.segments) > 1:
        found["segments"] = [list(segment) for segment in completion.trace.segments]
    if sample.shaped is not None:
        found["combined"] = sample.shaped.combined
        found |= {"masked": True} if sample.shaped.masked else {}
    if sample.error is not None:
        found["error"] = sample.error
    if sample.extra:
        found["extra"] = dict(sample.extra)
    if sample.metrics:
        found["metrics"] = [list(pair) for pair in sample.metrics]
    return found
