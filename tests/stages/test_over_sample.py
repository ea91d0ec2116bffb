"""Over-sampling: the groups that are whole first get the places, nothing runs longer than it must, and what is dropped is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.engines.fake import FakeSampler
from rftcli.plan.plan_sampling import OverSamplePlan
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected, collect
from rftcli.stages.outcomes import Ask
from rftcli.stages.over_sample import Candidate, Filled, fill, num_spares
from rftcli.types import Completion, Prompt, Request, SamplingSettings

SETS = ("rollout={max_new_tokens: 8, samples_per_prompt: 3}", "rollout.over_sample={factor: 1.5, slice_tokens: 2}", "batch.prompts_per_step=4")


class Rows:
    def __init__(self, made: SimpleNamespace) -> None:
        self.next_draw = 0
        self._made = made

    def draw(self, first: int, count: int) -> Sequence[Prompt]:
        return [self._made.prompt(turn) for turn in range(first, first + count)]


def engine(lengths: dict[tuple[int, int], int], sampled: list[int]) -> FakeSampler:
    """Answers of chosen lengths that end by themselves; counts the tokens of every call."""

    class Counted(FakeSampler):
        def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
            for made in super().generate(requests, settings):
                before = next(request for request in requests if request.prompt.draw == made.prompt.draw).partial.get(made.sample)
                sampled.append(len(made.trace.ids) - (0 if before is None else len(before.ids)))
                yield made

    def respond(prompt: Prompt, sample: int, _: SamplingSettings) -> Sequence[int]:
        return [*[3] * (lengths.get((prompt.draw, sample), 1) - 1), 0]

    return Counted(lambda ids, skip_special_tokens=True: " ".join(map(str, ids)), respond, vocab_size=11, eos_ids=(0,))


def step(made: SimpleNamespace, world: Any, lengths: dict[tuple[int, int], int], sampled: list[int] | None = None) -> tuple[Rows, Collected]:
    source, plan = Rows(made), made.plan(*SETS, ranks=world.size)
    scores = made.Scores(lambda completion: float(completion.sample == 0))
    sampler = engine(lengths, [] if sampled is None else sampled)
    return source, collect(source, sampler, scores, plan, world, step=1, clock=lambda: 0.0, tick=lambda *_: None)


def test_the_longest_groups_make_room(made: SimpleNamespace) -> None:
    """Six prompts for four places. 1 and 3 have one long answer each; they are stopped after the second slice of two tokens."""
    sampled: list[int] = []
    source, found = step(made, SoloWorld(), {(1, 2): 8, (3, 0): 7, (2, 1): 4, (4, 0): 2}, sampled)
    assert sorted(group.prompt.draw for group in found.groups) == [0, 2, 4, 5] and source.next_draw == 6
    assert all([sample.completion.sample for sample in group.samples] == [0, 1, 2] for group in found.groups)
    assert found.metrics["over_sample"] == {"prompts_sampled": 6, "groups_stopped": 2, "groups_unused": 0, "tokens_unused": 2 * (2 + 4)}
    (long,) = [sample for group in found.groups for sample in group.samples if len(sample.completion.trace.ids) == 4]
    assert long.completion.trace.ids == (3, 3, 3, 0) and str(long.completion.finish) == "stop"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_shortest_whole_groups_are_taken_and_no_slice_is_wasted(made: SimpleNamespace, data: st.DataObject) -> None:
    """The reference knows all lengths: the slice at which enough groups are whole, then by length and draw."""
    lengths = {(draw, sample): data.draw(st.integers(1, 12)) for draw in range(6) for sample in range(3)}
    sampled: list[int] = []
    _, found = step(made, SoloWorld(), lengths, sampled)
    longest = {draw: min(8, max(lengths[draw, sample] for sample in range(3))) for draw in range(6)}  # cut at 8
    taken = sorted(range(6), key=lambda draw: (longest[draw], draw))[:4]
    end = -(-max(longest[draw] for draw in taken) // 2) * 2
    assert {group.prompt.draw for group in found.groups} == set(taken)
    assert sum(sampled) == sum(min(length, end) for length in lengths.values())
    told = found.metrics["over_sample"]
    assert told["groups_stopped"] == sum(length > end for length in longest.values()) and told["groups_stopped"] + told["groups_unused"] == 2
    for group in found.groups:
        for sample in group.samples:
            assert len(sample.completion.trace.ids) == min(8, lengths[group.prompt.draw, sample.completion.sample])


def test_each_rank_fills_its_own_places(made: SimpleNamespace) -> None:
    ranks = made.on_ranks(2, lambda world: step(made, world, {(0, 0): 8, (1, 0): 8}))
    draws = sorted(group.prompt.draw for _, found in ranks for group in found.groups)
    assert len(draws) == 4 == len(set(draws)) and all(len(found.groups) == 2 for _, found in ranks)
    assert all(source.next_draw == 6 and found.metrics["over_sample"]["prompts_sampled"] == 6 for source, found in ranks)


@pytest.mark.parametrize(
    ("factor", "places", "ranks", "spares"),
    [(1.25, 64, 1, 16), (1.25, 64, 8, 16), (1.1, 64, 8, 8), (1.1, 10, 1, 1), (2.0, 6, 3, 6), (1.01, 4, 4, 4)],
)
def test_spare_prompts_are_equally_many_on_every_rank(factor: float, places: int, ranks: int, spares: int) -> None:
    assert num_spares(OverSamplePlan(factor=factor, slice_tokens=1), places, ranks) == spares


def test_a_prompt_keeps_the_place_it_asked_for(made: SimpleNamespace) -> None:
    """Candidates 10 and 12 are long; 20 and 21 come in for them, in order."""
    sampler = engine({(10, 0): 8, (12, 0): 8}, [])

    def candidate(draw: int) -> Candidate:
        return Candidate(ask=Ask(draw=draw, turn=draw), prompt=made.prompt(draw), longest=8)

    def generate(requests: Sequence[Request], limit: int) -> Iterator[Completion]:
        return sampler.generate(requests, SamplingSettings(max_new_tokens=limit, seed=0))

    plan = OverSamplePlan(factor=2.0, slice_tokens=2)
    found: Filled = fill(plan, {slot: candidate(10 + slot) for slot in range(4)}, [candidate(21), candidate(20)], [0], generate)
    assert {slot: one.ask.draw for slot, one in found.places.items()} == {0: 20, 1: 11, 2: 21, 3: 13}


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_keeps_the_same_groups(made: SimpleNamespace, size: int) -> None:
    """The source's position is all there is to remember: it counts the dropped prompts too."""
    lengths = {(draw, sample): 1 + (5 * draw + 3 * sample) % 9 for draw in range(40) for sample in range(3)}

    def work(world: Any, resumed_at: int) -> list[tuple[int, list[Any]]]:
        source, plan, ends = Rows(made), made.plan(*SETS, ranks=world.size), []
        for number in range(1, 4):
            if number == resumed_at:
                position, source = source.next_draw, Rows(made)
                source.next_draw = position
            scores = made.Scores(lambda completion: float(completion.sample == 0))
            found = collect(source, engine(lengths, []), scores, plan, world, step=number, clock=lambda: 0.0, tick=lambda *_: None)
            ends.append((source.next_draw, [(group.prompt.draw, [s.completion.trace for s in group.samples]) for group in found.groups]))
        return ends

    straight = made.on_ranks(size, lambda world: work(world, 0))
    assert [position for position, _ in straight[0]] == [6, 12, 18]
    assert all(made.on_ranks(size, lambda world, at=at: work(world, at)) == straight for at in (2, 3))
