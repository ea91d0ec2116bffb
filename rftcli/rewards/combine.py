"""From the parts of a completion to its reward: COMBINES, one function each, and functions of the user that see a whole group.

Whatever the way: a part that errors leaves the sample without a reward, unless its `on_error` is `abstain`; a part that abstains is left out; a
sample without a value from any weighted part has the reward None, which is not 0. Parts of weight 0 take no part, neither by value nor by error.

Leaves out scoring the parts (`table`) and shaping of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rftcli.rewards.functions import UserFunction, as_number, describe, metric_value
from rftcli.rewards.spec import PLAIN_SUM, CombineSpec, PartSpec
from rftcli.types import PartScore, ScoredSample

GROUP_RECORD: Mapping[str, str] = {
    "scores": "one mapping a completion: name of the part -> value, or None",
    "errors": "one mapping a completion: name of the part -> error, those that failed only",
    "weights": "name of the part -> weight",
    "prompt": "the prompt as the model read it",
    "completions": "the answers' texts",
    "completion_ids": "the sampled token ids, a list for each completion",
    "reference": "the row's reference answer, or None",
    "label": "the row's label",
    "columns": "all columns of the row, a mapping",
    "finishes": "stop, length or abort, for each completion",
    "tokens": "number of sampled tokens of each completion",
    "samples": "index within the group of each completion; -1 is a greedy twin",
    "draw": "index of the draw, the group's identity",
    "step": "the step of the run, or None outside of one",
    "total_steps": "steps of the whole run, or None outside of one",
}
"""What a combine function may ask for, and what it is. Lists have one entry for each completion of the group, by sample index."""

Weighted = Sequence[tuple[PartSpec, PartScore]]
"""The parts with a weight, in the recipe's order."""


MAX_REWARD = 1e18
"""A larger reward is an error of its completion, not of the run: rewards become float32, and their squares must fit."""


def bounded(reward: float | None) -> tuple[float | None, str | None]:
    """(reward, None), or (None, what is wrong with it)."""
    if reward is None or abs(reward) <= MAX_REWARD:
        return reward, None
    return None, f"the parts come to a reward of {reward:g}, expected a finite number of at most {MAX_REWARD:g}"


def combined(spec: CombineSpec, specs: Sequence[PartSpec], scores: Sequence[PartScore]) -> float | None:
    """The reward of one completion by any way but python."""
    counted = [(part, score) for part, score in zip(specs, scores, strict=True) if part.weight]
    if any(score.error is not None and part.on_error != "abstain" for part, score in counted):
        return None
    if all(score.value is None for _, score in counted):
        return None
    return COMBINES[spec.how](counted, spec)


def weighted_sum(specs: Sequence[PartSpec], scores: Sequence[PartScore]) -> float | None:
    """The reward of one completion as a plain sum.

    >>> spec, score = PartSpec(name="a", kind="rule", target="exact", weight=0.5), PartScore(name="a", value=1.0, weight=0.5, seconds=0.0)
    >>> weighted_sum([spec], [score])
    0.5
    """
    return combined(PLAIN_SUM, specs, scores)


def _given(counted: Weighted) -> list[float]:
    return [part.weight * score.value for part, score in counted if score.value is not None]


def _sum(counted: Weighted, spec: CombineSpec) -> float | None:
    """w1 s1 + w2 s2 ...; with `renormalise` times (all |w|) / (|w| of the parts that gave a value)."""
    total = sum(_given(counted))
    if not spec.renormalise or all(score.value is not None for _, score in counted):
        return total
    given = math.fsum(abs(part.weight) for part, score in counted if score.value is not None)
    return total * math.fsum(abs(part.weight) for part, _ in counted) / given


def _product(counted: Weighted, spec: CombineSpec) -> float | None:
    """w1 s1 x w2 s2 ..."""
    return math.prod(_given(counted))


def _least(counted: Weighted, spec: CombineSpec) -> float | None:
    """The least of w1 s1, w2 s2, ..."""
    return min(_given(counted))


def _gate(counted: Weighted, spec: CombineSpec) -> float | None:
    """The sum of the other parts where the value of the first is above 0, or it abstained; else the first part's own w s."""
    (gate, opened), *behind = counted
    if opened.value is not None and opened.value <= 0:
        return gate.weight * opened.value
    given = _given(behind)
    return sum(given) if given else None


# How to add one: a function (the weighted parts, spec) -> reward or None, a row here, its name in `spec.COMBINES` and in the recipe's `combine`.
COMBINES: dict[str, Callable[[Weighted, CombineSpec], float | None]] = {"sum": _sum, "product": _product, "min": _least, "gate": _gate}


def combine_group(
    function: UserFunction, target: str, specs: Sequence[PartSpec], group: Iterable[ScoredSample], texts: Mapping[int, str], **more: Any
) -> list[ScoredSample]:
    """The samples of one group with the rewards that the user's function gives them, and its metrics with the first. An error of the function is
    the error of every sample. A part that failed with `on_error: fail_sample` keeps its sample without a reward, whatever the function says.

    `texts`: sample index -> the answer as parts read it; `more`: step and total_steps.
    """
    members = sorted(group, key=lambda sample: sample.completion.sample)
    strict = {part.name for part in specs if part.weight and part.on_error != "abstain"}
    try:
        rewards, metrics = read_rewards(target, function(_record(members, specs, texts, **more)), len(members))
    except (Exception, SystemExit) as caught:  # anybody's code: whatever it raises is a value, never a crash
        error = f"{target}: {describe(caught)}"
        return [replace(member, reward=None, error=error) for member in members]
    found = []
    for member, reward in zip(members, rewards, strict=True):
        failed = any(part.error is not None and part.name in strict for part in member.parts)
        found.append(replace(member, reward=None if failed else reward))
    found[0] = replace(found[0], metrics=(*found[0].metrics, *metrics.items()))
    return found


def _record(members: Sequence[ScoredSample], specs: Sequence[PartSpec], texts: Mapping[int, str], **more: Any) -> dict[str, Any]:
    """The fields of GROUP_RECORD. Lists and mappings are new for every call: a function may change them."""
    prompt = members[0].completion.prompt
    completions = [member.completion for member in members]
    return {
        "scores": [{part.name: part.value for part in member.parts} for member in members],
        "errors": [{part.name: part.error for part in member.parts if part.error is not None} for member in members],
        "weights": {part.name: part.weight for part in specs},
        "prompt": prompt.text,
        "completions": [texts[completion.sample] for completion in completions],
        "completion_ids": [list(completion.trace.ids) for completion in completions],
        "reference": prompt.reference,
        "label": prompt.label,
        "columns": dict(prompt.columns),
        "finishes": [str(completion.finish) for completion in completions],
        "tokens": [len(completion.trace.ids) for completion in completions],
        "samples": [completion.sample for completion in completions],
        "draw": prompt.draw,
        **more,
    }


def read_rewards(target: str, returned: Any, count: int) -> tuple[list[float | None], dict[str, float]]:
    """What a combine function returned: a list of `count` numbers or None, or a pair (list, metrics). TypeError or ValueError for anything else;
    nothing is ever stretched over the group.

    >>> read_rewards("m:f", ([1, None], {"agreement": 0.5}), 2)
    ([1.0, None], {'agreement': 0.5})
    """
    metrics: Any = {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned, metrics = returned
    if not isinstance(returned, (list, tuple)):
        kind = type(returned).__name__
        raise TypeError(f"`{target}` must return a list of {count} numbers for {count} completions, got a {kind}")
    if len(returned) != count:
        raise ValueError(f"`{target}` must return {count} numbers for {count} completions, got {len(returned)}")
    return [as_number(target, value) for value in returned], {str(name): metric_value(str(name), value) for name, value in metrics.items()}
