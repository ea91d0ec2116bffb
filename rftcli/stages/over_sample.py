"""Over-sampling: more prompts are asked for than a step trains on, and when enough groups are whole the longest answers are given up.

Answers grow in slices of so many tokens. After each slice a rank counts its whole groups; once there are as many as it has places, what is still
unfinished is dropped. So no answer runs much longer than the step needs, with any engine that goes on from a partial answer, and without a clock:
what is kept depends on lengths alone, and a resumed run does the same.

Each rank fills its own places from its own candidates (groups do not move), so unlike the other strategies this one depends on the number of ranks.
Its bias: groups with a long answer are dropped more often, so training sees shorter answers and the prompts that get them. Within a group all
samples are there, so baselines are unharmed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftcli.plan.plan_sampling import OverSamplePlan
from rftcli.protocols import World
from rftcli.stages.outcomes import Ask
from rftcli.types import Completion, FinishReason, Prompt, Request

Generate = Callable[[Sequence[Request], int], Iterable[Completion]]
"""(requests of one label, tokens of the longest answer among them) -> completions."""


def num_spares(plan: OverSamplePlan, places: int, ranks: int) -> int:
    """Prompts beyond the places of a step, as many on every rank.

    >>> num_spares(OverSamplePlan(factor=1.25, slice_tokens=1), 16, 2)
    4
    """
    return ranks * math.ceil(round((plan.factor - 1) * places / ranks, 6))


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A prompt that may get a place, and what there is of its samples."""

    ask: Ask
    prompt: Prompt
    longest: int
    """Tokens at which an answer of its label is cut for good."""
    answers: dict[int, Completion] = field(default_factory=dict)
    """By sample, finished or not; one that is missing has no token yet."""

    def open(self, samples: Iterable[int]) -> list[int]:
        """The samples that are not finished."""
        return [sample for sample in samples if sample not in self.answers or not self._finished(self.answers[sample])]

    def stands_at(self, samples: Iterable[int]) -> int:
        """Tokens of its open answers, which grow side by side; of the shortest where they do not."""
        return min((len(self.answers[sample].trace.ids) if sample in self.answers else 0 for sample in self.open(samples)), default=0)

    def _finished(self, answer: Completion) -> bool:
        return answer.finish is not FinishReason.LENGTH or len(answer.trace.ids) >= self.longest

    @property
    def tokens(self) -> int:
        """Of its longest answer so far."""
        return max(len(answer.trace.ids) for answer in self.answers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """Which candidate got which place, and what it took."""

    places: Mapping[int, Candidate]
    stopped: int
    """Candidates that were unfinished when enough others were whole."""
    unused: int
    """Candidates that were whole and not needed."""
    tokens_unused: int


def fill(
    plan: OverSamplePlan, wanted: Mapping[int, Candidate], spares: Sequence[Candidate], samples: Sequence[int], generate: Generate
) -> Filled:
    """Let the answers of all candidates grow until as many groups are whole as there are places (`wanted`: place -> the candidate that asked for it).

    The whole groups with the shortest longest answer get the places, earlier draws first among equals; one that asked for a place itself keeps it.
    """
    everyone = [*wanted.values(), *spares]
    whole: list[Candidate] = []
    limit = 0
    while len(whole) < len(wanted):
        limit += plan.slice_tokens
        grow([(one, limit) for one in everyone if one.open(samples)], samples, generate)
        whole = [candidate for candidate in everyone if not candidate.open(samples)]
    best = sorted(whole, key=lambda candidate: (candidate.tokens, candidate.ask.draw))[: len(wanted)]
    drawn = {candidate.ask.draw for candidate in best}
    places = {slot: candidate for slot, candidate in wanted.items() if candidate.ask.draw in drawn}
    own = {candidate.ask.draw for candidate in places.values()}
    others = iter(sorted((candidate for candidate in best if candidate.ask.draw not in own), key=lambda candidate: candidate.ask.draw))
    places |= {slot: next(others) for slot in sorted(wanted) if slot not in places}
    left = [candidate for candidate in everyone if candidate.ask.draw not in drawn]
    return Filled(
        places=places,
        stopped=len(everyone) - len(whole),
        unused=len(whole) - len(best),
        tokens_unused=sum(len(answer.trace.ids) for candidate in left for answer in candidate.answers.values()),
    )


def grow(candidates: Iterable[tuple[Candidate, int]], samples: Sequence[int], generate: Generate) -> None:
    """The open samples of each candidate up to its number of tokens, or to their end; one call of the engine for each label."""
    labels: dict[str, list[tuple[Candidate, int]]] = {}
    for candidate, limit in candidates:
        labels.setdefault(candidate.prompt.label, []).append((candidate, min(limit, candidate.longest)))
    for alike in labels.values():
        by_draw = {candidate.prompt.draw: candidate for candidate, _ in alike}
        requests = []
        for candidate, limit in alike:
            unfinished = tuple(candidate.open(samples))
            partial = {sample: candidate.answers[sample].trace for sample in unfinished if sample in candidate.answers}
            requests.append(Request(prompt=candidate.prompt, samples=unfinished, partial=partial, limit=limit))
        for answer in generate(requests, max(limit for _, limit in alike)):
            by_draw[answer.prompt.draw].answers[answer.sample] = answer


def over_sample_metrics(filled: Filled, world: World) -> Mapping[str, Any]:
    """`over_sample` of the step event, over all ranks. Collective."""
    names = ("prompts_sampled", "groups_stopped", "groups_unused", "tokens_unused")
    sampled = len(filled.places) + filled.stopped + filled.unused
    totals = world.sum([sampled, filled.stopped, filled.unused, filled.tokens_unused])
    return {"over_sample": {name: int(total) for name, total in zip(names, totals, strict=True)}}
