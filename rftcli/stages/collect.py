"""Draw prompts, let the engine answer, let the rewards score while it still answers: prompts in, whole scored groups out.

Each rank collects the groups it will train on (`batchmath.groups_of_rank`), so no completion ever travels. Leaves out advantages and everything
about models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from rftcli.algo import batchmath
from rftcli.errors import RftError
from rftcli.plan.plan import Plan, RolloutPlan
from rftcli.protocols import Sampler, Scorer, Source, World
from rftcli.stages.twins import asked_samples, with_twin_apart
from rftcli.types import Completion, Group, Request, SamplingSettings, ScoredSample

Tick = Callable[[str, int, int], None]
"""(stage, done, of): progress of this rank; called often, the receiver thins it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """This rank's groups of one step, by mini-batch and then in a fixed order."""

    mini_batches: tuple[tuple[Group, ...], ...]
    rollout_seconds: float
    score_seconds: float
    """Time the rewards took after the last completion had been generated."""

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(group for mini_batch in self.mini_batches for group in mini_batch)


def settings_of(plan: RolloutPlan, seed: int) -> SamplingSettings:
    return SamplingSettings(
        max_new_tokens=plan.max_new_tokens,
        seed=seed,
        min_new_tokens=plan.min_new_tokens,
        temperature=plan.temperature,
        top_p=plan.top_p,
        top_k=plan.top_k,
        min_p=plan.min_p,
        stop=plan.stop,
        stop_token_ids=plan.stop_token_ids,
        ignore_eos=plan.ignore_eos,
        repetition_penalty=plan.repetition_penalty,
        presence_penalty=plan.presence_penalty,
        frequency_penalty=plan.frequency_penalty,
        logit_bias=plan.logit_bias,
        bad_words=plan.bad_words,
        structured=plan.structured,
        options=plan.options,
    )


def collect(
    source: Source, sampler: Sampler, scorer: Scorer, plan: Plan, world: World, *, step: int, clock: Callable[[], float], tick: Tick
) -> Collected:
    """The groups of `step` that this rank owns; moves the source past the step's draws on every rank alike."""
    batch = plan.batch
    mine = batchmath.groups_of_rank(plan.seed, step, batch.prompts_per_step, batch.updates_per_step, world.size, world.rank)
    first = source.next_draw
    prompts = {index: source.draw(first + index, 1)[0] for mini_batch in mine for index in sorted(mini_batch)}
    samples = asked_samples(plan)
    requests = [Request(prompt=prompt, samples=samples) for prompt in prompts.values()]

    settings = replace(settings_of(plan.rollout, plan.seed), logprobs=plan.probes(step))
    start = clock()
    generated_at = start

    def generate() -> Iterator[Completion]:
        nonlocal generated_at
        total = len(requests) * len(samples)
        one_after_another = (sampler.generate(part, settings) for part in batchmath.rollouts(requests, batch.rollouts_per_update))
        for done, completion in enumerate(chain.from_iterable(one_after_another), start=1):
            tick("rollout", done, total)
            yield completion
        generated_at = clock()

    groups = group_up(scorer.score(generate()), [request.prompt.draw for request in requests], len(samples))
    end = clock()
    source.next_draw = first + batch.prompts_per_step

    mini_batches = tuple(tuple(groups[first + index] for index in mini_batch) for mini_batch in mine)
    return Collected(mini_batches=mini_batches, rollout_seconds=generated_at - start, score_seconds=end - generated_at)


def group_up(scored: Iterable[ScoredSample], draws: list[int], samples: int) -> dict[int, Group]:
    """Whole groups by draw, samples in order. Raises RftError if the engine or the scorer lost or doubled a completion."""
    found: dict[int, dict[int, ScoredSample]] = {draw: {} for draw in draws}
    for sample in scored:
        draw, index = sample.completion.prompt.draw, sample.completion.sample
        if draw not in found or index in found[draw]:
            raise RftError(f"the engine returned sample {index} of draw {draw}, which was not asked for or came twice")
        found[draw][index] = sample
    for draw, members in found.items():
        if len(members) != samples:
            raise RftError(f"the engine returned {len(members)} of {samples} samples of draw {draw}")
    return {
        draw: with_twin_apart(Group(prompt=members[min(members)].completion.prompt, samples=tuple(members[index] for index in sorted(members))))
        for draw, members in found.items()
    }
