"""Draw prompts, let the engine answer, let the rewards score while it still answers: prompts in, whole scored groups out.

Each rank collects the groups it will train on (`batchmath.groups_of_rank`), so no completion ever travels. Which prompt a place of the step gets is
in `drawing`, when it gets another one in `refill`. Leaves out advantages and everything about models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from rftcli.algo import batchmath
from rftcli.errors import RftError
from rftcli.plan.plan import Plan, RolloutPlan
from rftcli.protocols import Sampler, Scorer, Source, World
from rftcli.stages.drawing import NOTHING, Drawing, Memory
from rftcli.stages.keep import kept_metrics, trained_samples
from rftcli.stages.outcomes import Ask
from rftcli.stages.over_sample import Candidate, Filled, fill, num_spares, over_sample_metrics
from rftcli.stages.partial import Kept, Pool
from rftcli.stages.records import SampleRecord
from rftcli.stages.refill import Refill, places
from rftcli.stages.twins import asked_samples, with_twin_apart
from rftcli.types import Completion, Group, Prompt, Request, SamplingSettings, ScoredSample

T = TypeVar("T")
Tick = Callable[[str, int, int], None]
"""(stage, done, of): progress of this rank; called often, the receiver thins it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """This rank's groups of one step, by mini-batch and then in a fixed order."""

    mini_batches: tuple[tuple[Group, ...], ...]
    rollout_seconds: float
    score_seconds: float
    """Time the rewards took after the last completion had been generated."""
    replaced: tuple[SampleRecord, ...] = ()
    """Completions of this rank that were sampled and scored, and whose groups lost their places to others."""
    trained: frozenset[tuple[int, int]] | None = None
    """(draw, sample) of this rank that are trained on; None: all. Baselines see all samples of a group."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Of the step event, over all ranks: what refill, replay and the curriculum did."""

    def trains(self, sample: ScoredSample) -> bool:
        return self.trained is None or (sample.completion.prompt.draw, sample.completion.sample) in self.trained

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


def sampling_settings(plan: RolloutPlan, seed: int, label: str) -> SamplingSettings:
    """How training completions of a label are sampled: what the plan says of all, and of this one."""
    settings = replace(settings_of(plan, seed), first_token_temperature=plan.first_token_temperature)
    own = plan.by_label.get(label)
    if own is None:
        return settings
    return replace(
        settings,
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        min_p=own.min_p,
        max_new_tokens=own.max_new_tokens,
        min_new_tokens=own.min_new_tokens,
        stop=own.stop,
        stop_token_ids=own.stop_token_ids,
    )


def collect(
    source: Source,
    sampler: Sampler,
    scorer: Scorer,
    plan: Plan,
    world: World,
    *,
    step: int,
    clock: Callable[[], float],
    tick: Tick,
    memory: Memory = NOTHING,
) -> Collected:
    """The groups of `step` that this rank owns; moves the source past the step's draws on every rank alike."""
    batch = plan.batch
    mine = batchmath.groups_of_rank(plan.seed, step, batch.prompts_per_step, batch.updates_per_step, world.size, world.rank)
    rollout = _Rollout(sampler, scorer, plan, step, clock, tick)
    drawing = Drawing(source, memory, step)
    refill = Refill(plan.rollout.dynamic, drawing, world, metric=memory.metric, tells=bool(memory))

    rollouts = batch.rollouts_per_update
    unfinished: Mapping[str, Any] = {}
    asked: dict[int, Ask] = {}
    if plan.rollout.partial is None:
        asked = drawing.first(batch.prompts_per_step)
    else:
        assert memory.partial is not None, "what is kept needs a place"
        unfinished = _kept_first(rollout, memory.partial, drawing, refill, places(mine), plan, world)
    if plan.rollout.over_sample is not None and plan.rollout.partial is None:
        spares = drawing.fresh(num_spares(plan.rollout.over_sample, batch.prompts_per_step, world.size))[world.rank :: world.size]
        filled, groups = rollout.first_whole({slot: asked[slot] for slot in places(mine)}, spares, drawing)
        asked = refill.after({slot: candidate.ask for slot, candidate in filled.places.items()}, groups)
        unfinished = over_sample_metrics(filled, world)
    while asked:
        prompts = {slot: drawing.prompt(asked[slot]) for slot in places(mine) if slot in asked}
        asked = refill.after(asked, rollout.groups(prompts, rollouts))
        rollouts = 1
    source.next_draw = drawing.turn
    memory.after(step, refill.outcomes)

    mini_batches = tuple(tuple(refill.groups[slot] for slot in mini_batch) for mini_batch in mine)
    trained = trained_samples(refill.groups.values(), plan.rollout.keep)
    return Collected(
        mini_batches=mini_batches,
        rollout_seconds=rollout.seconds,
        score_seconds=rollout.score_seconds,
        replaced=tuple(refill.replaced),
        trained=trained,
        metrics={**refill.metrics(), **drawing.metrics(), **unfinished, **kept_metrics(trained, refill.groups.values(), world)},
    )


def _kept_first(rollout: _Rollout, kept: Kept, drawing: Drawing, refill: Refill, slots: list[int], plan: Plan, world: World) -> Mapping[str, Any]:
    """Fill this rank's places from answers that were kept and from fresh prompts, and keep what is left; metrics of the step event. Collective."""
    drawing.keep_clear(max(world.gather(max((held.ask.draw for held in kept.held), default=-1))))
    pool = rollout.pool(kept, drawing, world, places=len(slots))
    over_sample = plan.rollout.over_sample
    pool.top_up(None if over_sample is None else num_spares(over_sample, plan.batch.prompts_per_step, world.size) // world.size)
    while True:
        filled = rollout.timed(partial(pool.fill, slots))
        asked = refill.after({slot: one.ask for slot, one in filled.items()}, rollout.scored(filled))
        if not asked:
            return pool.close()
        slots = [slot for slot in slots if slot in asked]
        pool.add(asked[slot] for slot in slots)


class _Rollout:
    """Engine and scorer in one step, and the time they take."""

    def __init__(self, sampler: Sampler, scorer: Scorer, plan: Plan, step: int, clock: Callable[[], float], tick: Tick) -> None:
        self.seconds = 0.0
        self.score_seconds = 0.0
        """After the last completion of a rollout had been generated."""
        self._sampler, self._scorer, self._plan, self._clock, self._tick = sampler, scorer, plan, clock, tick
        self._logprobs = plan.probes(step)
        self._done = self._of = 0

    def groups(self, prompts: Mapping[int, Prompt], rollouts: int) -> dict[int, Group]:
        """A whole scored group for each prompt, by the same keys; generated in so many parts, one after another."""
        if not prompts:  # an engine over several ranks, and sharded reward models, meet on every rank
            nothing = self._sampler.generate([], sampling_settings(self._plan.rollout, self._plan.seed, ""))
            assert not list(self._scorer.score(nothing)), "got something that was not asked for"
            return {}
        samples = asked_samples(self._plan)
        requests = [Request(prompt=prompt, samples=samples) for prompt in prompts.values()]
        self._of += len(requests) * len(samples)
        start = self._clock()
        generated_at = start

        def generate() -> Iterator[Completion]:
            nonlocal generated_at
            for completion in chain.from_iterable(self._parts(requests, rollouts)):
                self._done += 1
                self._tick("rollout", self._done, self._of)
                yield completion
            generated_at = self._clock()

        groups = group_up(self._scorer.score(generate()), [request.prompt.draw for request in requests], len(samples))
        end = self._clock()
        self.seconds += generated_at - start
        self.score_seconds += end - generated_at
        return {slot: groups[prompt.draw] for slot, prompt in prompts.items()}

    def first_whole(self, wanted: Mapping[int, Ask], spares: Sequence[Ask], drawing: Drawing) -> tuple[Filled, dict[int, Group]]:
        """As many whole groups as are wanted, of more candidates: the ones that are whole first, scored, by place."""
        plan, candidate = self._plan.rollout.over_sample, self._candidates(drawing)
        assert plan is not None
        candidates, others = {slot: candidate(ask) for slot, ask in wanted.items()}, list(map(candidate, spares))
        filled = self.timed(lambda: fill(plan, candidates, others, asked_samples(self._plan), self._generate))
        return filled, self.scored(filled.places)

    def pool(self, kept: Kept, drawing: Drawing, world: World, *, places: int) -> Pool:
        """What this rank goes on with, and how."""
        plan, over_sample = self._plan.rollout.partial, self._plan.rollout.over_sample
        assert plan is not None
        return Pool(
            kept,
            plan,
            drawing,
            world,
            places=places,
            slice_tokens=None if over_sample is None else over_sample.slice_tokens,
            samples=asked_samples(self._plan),
            candidate=self._candidates(drawing),
            generate=self._generate,
        )

    def timed(self, work: Callable[[], T]) -> T:
        """Do it, as part of the rollout."""
        start = self._clock()
        found = work()
        self.seconds += self._clock() - start
        return found

    def scored(self, filled: Mapping[int, Candidate]) -> dict[int, Group]:
        """The groups of whole candidates, by the same keys."""
        answers = [answer for one in filled.values() for answer in one.answers.values()]
        start = self._clock()
        groups = group_up(self._scorer.score(answers), [one.prompt.draw for one in filled.values()], len(asked_samples(self._plan)))
        self.score_seconds += self._clock() - start
        return {slot: groups[one.prompt.draw] for slot, one in filled.items()}

    def _candidates(self, drawing: Drawing) -> Callable[[Ask], Candidate]:
        def candidate(ask: Ask) -> Candidate:
            prompt = drawing.prompt(ask)
            return Candidate(ask=ask, prompt=prompt, longest=sampling_settings(self._plan.rollout, self._plan.seed, prompt.label).max_new_tokens)

        return candidate

    def _generate(self, requests: Sequence[Request], limit: int) -> Iterator[Completion]:
        """Requests of one label, whose answers are cut at `limit` at the latest."""
        settings = sampling_settings(self._plan.rollout, self._plan.seed, requests[0].prompt.label)
        shortest = min(settings.min_new_tokens, limit)
        self._of += sum(len(request.samples) for request in requests)
        for answer in self._sampler.generate(requests, replace(settings, max_new_tokens=limit, min_new_tokens=shortest, logprobs=self._logprobs)):
            self._done += 1
            self._tick("rollout", self._done, self._of)
            yield answer

    def _parts(self, requests: list[Request], rollouts: int) -> Iterator[Iterator[Completion]]:
        """One call of the engine for each rollout and each way to sample in it."""
        for part in batchmath.rollouts(requests, rollouts):
            alike: dict[str | None, list[Request]] = {}
            for request in part:
                label = request.prompt.label
                alike.setdefault(label if label in self._plan.rollout.by_label else None, []).append(request)
            for together in alike.values():
                settings = sampling_settings(self._plan.rollout, self._plan.seed, together[0].prompt.label)
                yield self._sampler.generate(together, replace(settings, logprobs=self._logprobs))


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
