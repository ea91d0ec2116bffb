"""Partial rollouts: what a step does not finish goes on in the next one. Nothing is lost, nothing is too old, a resume changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.engines.fake import FakeSampler
from rftcli.errors import ResumeError
from rftcli.plan.plan_sampling import PartialPlan
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected, collect
from rftcli.stages.drawing import Memory
from rftcli.stages.evaluate import EvalSet, evaluate
from rftcli.stages.outcomes import Ask
from rftcli.stages.partial import Held, Kept, Piece, must_now, stale
from rftcli.stages.replay import Replay
from rftcli.types import Completion, FinishReason, Group, Prompt, Request, SamplingSettings, TokenTrace

LONGEST = 12
SETS = (f"rollout={{max_new_tokens: {LONGEST}, samples_per_prompt: 2}}", "algorithm.loss.old=sampler", "batch.prompts_per_step=4")
BUDGET = ("rollout={partial: {budget_tokens: 3}, max_version_lag: 3}",)
SLICES = ("rollout={partial: {}, over_sample: {factor: 1.5, slice_tokens: 2}, max_version_lag: 2}",)
BOTH = ("rollout={partial: {budget_tokens: 4}, over_sample: {factor: 2.0, slice_tokens: 2}, max_version_lag: 2}",)


class Rows:
    num_rows = 1000

    def __init__(self, made: SimpleNamespace) -> None:
        self.next_draw = 0
        self._made = made

    def draw(self, first: int, count: int) -> Sequence[Prompt]:
        return [self._made.prompt(turn) for turn in range(first, first + count)]


def length_of(lengths: Mapping[tuple[int, int], int], draw: int, sample: int) -> int:
    return lengths.get((draw, sample), 1)


def noted_engine(lengths: Mapping[tuple[int, int], int], grown: list[tuple[int, int, int]]) -> FakeSampler:
    """Answers of chosen lengths, in tokens 1, 2, 3, ... and an end token 0; notes (draw, sample, tokens it grew by) of every call."""

    class Noted(FakeSampler):
        trains = True

        def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
            assert settings.logprobs or not self.trains, "old tokens need the log-probs that they were sampled with"
            for one in super().generate(requests, settings):
                before = next(request for request in requests if request.prompt.draw == one.prompt.draw).partial.get(one.sample)
                grown.append((one.prompt.draw, one.sample, len(one.trace.ids) - (0 if before is None else len(before.ids))))
                yield one

    def respond(prompt: Prompt, sample: int, _: SamplingSettings) -> Sequence[int]:
        return [*range(1, length_of(lengths, prompt.draw, sample)), 0]

    return Noted(lambda ids, skip_special_tokens=True: " ".join(map(str, ids)), respond, vocab_size=99, eos_ids=(0,))


class Run:
    """A run of collects on one rank; a step adds `updates` versions."""

    def __init__(
        self, made: SimpleNamespace, world: Any, lengths: Mapping[tuple[int, int], int], *sets: str, updates: int = 1, replays: bool = False
    ) -> None:
        self.plan = made.plan(*SETS, *sets, f"batch.updates_per_step={updates}", ranks=world.size)
        self.source, self.grown, self.number = Rows(made), [], 0
        self.sampler = noted_engine(lengths, self.grown)
        self._world, self._scores, self._updates = world, made.Scores(self.reward), updates
        assert self.plan.rollout.partial is not None
        self.kept = Kept(self.plan.rollout.partial, world, updates=updates, newest=lambda: self.sampler.version, data="rows")
        self.memory = Memory(partial=self.kept, replay=Replay(self.plan.rollout.replay) if replays else None)

    @staticmethod
    def reward(completion: Completion) -> float:
        """Every third prompt has no signal."""
        return float(completion.sample == 0 and completion.prompt.row % 3 != 1)

    def step(self) -> Collected:
        self.number += 1
        self.grown.clear()
        found = collect(
            self.source, self.sampler, self._scores, self.plan, self._world, step=self.number, clock=lambda: 0.0, tick=lambda *_: None,
            memory=self.memory,
        )  # fmt: skip
        self.sampler.version += self._updates
        return found

    def state(self) -> Any:
        """What a checkpoint holds, through JSON."""
        return json.loads(
            json.dumps({"draw": self.source.next_draw, "version": self.sampler.version, "step": self.number, "kept": self.kept.state_dict()})
        )

    def load(self, state: Any) -> None:
        self.source.next_draw, self.sampler.version, self.number = state["draw"], state["version"], state["step"]
        self.kept.load_state_dict(state["kept"])


def draws(found: Collected) -> list[int]:
    return sorted(group.prompt.draw for group in found.groups)


def traces(groups: Sequence[Group]) -> list[tuple[int, list[TokenTrace]]]:
    return [(group.prompt.draw, [sample.completion.trace for sample in group.samples]) for group in groups]


def test_a_budget_gives_places_to_others_and_keeps_what_is_unfinished(made: SimpleNamespace) -> None:
    """Budget 3. Draws 1 and 2 are longer: 4 and 5 take their places. 1 goes on and ends in the second step, 2 in the third, where it is due."""
    run = Run(made, SoloWorld(), {(1, 0): 5, (2, 1): 8}, *BUDGET)
    first = run.step()
    assert draws(first) == [0, 3, 4, 5] and run.source.next_draw == 6 and max(tokens for *_, tokens in run.grown) == 3
    assert first.metrics["partial"] == {
        "groups_continued": 0, "answers_continued": 0, "groups_kept": 2, "answers_kept": 2, "tokens_kept": 2 * (3 + 1), "groups_dropped": 0,
        "tokens_dropped": 0, "stale_token_fraction": 0.0,
    }  # fmt: skip
    assert first.metrics["version_lag"] == {"mean": 0.0, "max": 0}
    second = run.step()
    assert draws(second) == [1, 6, 7, 8] and run.source.next_draw == 10 and run.grown[:2] == [(1, 0, 2), (2, 1, 3)]
    (old,) = [sample.completion for group in second.groups for sample in group.samples if len(sample.completion.trace.ids) == 5]
    assert (old.trace.ids, old.trace.segments, old.policy_version, old.finish) == ((1, 2, 3, 4, 0), ((0, 0), (3, 1)), 1, FinishReason.STOP)
    assert old.trace.logprobs == (0.0,) * 5
    assert second.metrics["version_lag"] == {"mean": 2 / 8, "max": 1}  # both answers of draw 1 began with version 0
    assert second.metrics["partial"]["stale_token_fraction"] == (3 + 1) / (5 + 7)
    third = run.step()
    assert draws(third) == [2, 9, 10, 11] and third.metrics["version_lag"]["max"] == 2
    assert [held.ask.draw for held in run.kept.held] == [12] and run.source.next_draw == 13  # 9 waited whole, so three were asked for
    assert draws(run.step()) == [12, 13, 14, 15] and not run.kept.held


def test_over_sampling_drops_nothing(made: SimpleNamespace) -> None:
    """Six prompts in work. Step 1 trains on the four that are whole after two tokens; 1 and 3 go on while two of the four new prompts wait, whole."""
    run = Run(made, SoloWorld(), {(1, 0): 6, (3, 1): 4}, *SLICES)
    assert draws(run.step()) == [0, 2, 4, 5] and run.source.next_draw == 6
    second = run.step()
    assert draws(second) == [3, 6, 7, 8] and run.source.next_draw == 10  # oldest first; 1 is still at four tokens
    assert second.metrics["partial"]["groups_kept"] == 2 and second.metrics["partial"]["answers_kept"] == 1
    third = run.step()
    assert draws(third)[:2] == [1, 9] and third.metrics["partial"]["groups_continued"] == 2
    assert "over_sample" not in third.metrics  # nothing was stopped


def test_as_many_answers_are_in_work_as_the_budget_asks_for(made: SimpleNamespace) -> None:
    """Every answer has nine tokens, a budget three. The first steps go past it for the four groups that are missing and for no other; then three
    times the places are in work, and no step takes longer than its budget."""
    lengths = {(draw, sample): 9 for draw in range(200) for sample in range(2)}
    run, most = Run(made, SoloWorld(), lengths, *BUDGET), []
    for _ in range(12):
        found = run.step()
        grown = {draw: sum(tokens for other, sample, tokens in run.grown if (other, sample) == (draw, 0)) for draw, *_ in run.grown}
        assert sorted(grown.values())[:-4] == [3] * max(0, len(grown) - 4)
        most.append(max(grown.values(), default=0))
        assert found.metrics["version_lag"]["max"] <= 3
    assert most == [9, 6, 6, 3, 3, 0, 3, 3, 3, 3, 3, 3]  # in the sixth step enough groups were whole already


def test_the_step_waits_for_an_answer_that_would_be_too_old(made: SimpleNamespace) -> None:
    """Lag 1, and an answer as long as can be: it is finished in the second step, past the budget, and trained there."""
    run = Run(made, SoloWorld(), {(0, 0): 50}, "rollout={partial: {budget_tokens: 2}, max_version_lag: 1}")
    assert draws(run.step()) == [1, 2, 3, 4]
    second = run.step()
    assert 0 in draws(second) and second.metrics["version_lag"]["max"] == 1
    (answer,) = [sample.completion for group in second.groups for sample in group.samples if len(sample.completion.trace.ids) > 1]
    assert (len(answer.trace.ids), answer.finish, answer.trace.segments) == (LONGEST, FinishReason.LENGTH, ((0, 0), (2, 1)))


def test_evaluation_leaves_what_waits_alone(made: SimpleNamespace) -> None:
    """The same engine answers held-out prompts with the draws and samples of answers that wait: from their first token, to their end."""
    lengths = {(draw, 0): 5 for draw in range(40)}
    straight, evaluated = (Run(made, SoloWorld(), lengths, *BUDGET, "data.eval={a: {path: a}}") for _ in range(2))
    assert straight.step().metrics == evaluated.step().metrics
    before = evaluated.state()
    assert before["kept"]["ranks"] != ["[]"]
    sets, lines = [EvalSet(name="a", prompts=[made.prompt(draw) for draw in range(4)], samples_per_prompt=1)], []
    engine = evaluated.sampler
    engine.trains = False
    evaluate(sets, engine, made.Scores(Run.reward), evaluated.plan, SoloWorld(), step=1, tick=lambda *_: None, write=lines.append)
    engine.trains = True
    assert [line["tokens"] for line in lines] == [5] * 4 and evaluated.state() == before
    assert traces(evaluated.step().groups) == traces(straight.step().groups)


STRATEGIES = st.sampled_from(
    [
        (*BUDGET,), (*SLICES,), (*BOTH,), (*BUDGET, "rollout.dynamic={max_extra_rollouts: 2}"), (*BOTH, "rollout.dynamic={}"),
        (*BOTH, "rollout.keep={best: 1, worst: 0}"), (*BUDGET, "algorithm.advantage.kind=remax"),
    ]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data(), sets=STRATEGIES, ranks=st.sampled_from([1, 1, 2]), updates=st.sampled_from([1, 2]), steps=st.integers(1, 6))
def test_every_draw_is_trained_once_or_waits(
    made: SimpleNamespace, data: st.DataObject, sets: tuple[str, ...], ranks: int, updates: int, steps: int
) -> None:
    """Over random lengths: what was drawn is trained, or was refused for its rewards, or waits on one rank; whole, in order, and never too old."""
    listed = data.draw(st.lists(st.integers(1, 2 * LONGEST), min_size=7, max_size=23))
    lengths = {(draw, sample): listed[(5 * draw + 3 * sample) % len(listed)] for draw in range(400) for sample in (-1, 0, 1)}
    lag = 3 * updates

    def work(world: Any) -> Any:
        run, ends = Run(made, world, lengths, *sets, f"rollout.max_version_lag={lag}", updates=updates), []
        for _ in range(steps):
            found = run.step()
            assert [len(mini_batch) for mini_batch in found.mini_batches] == [4 // updates // ranks] * updates
            assert found.metrics["version_lag"]["max"] <= lag and found.metrics["partial"]["groups_dropped"] == 0
            for group in found.groups:
                for sample in (*group.samples, *([] if group.greedy is None else [group.greedy])):
                    check(sample.completion, lengths, newest=run.sampler.version - updates, lag=lag)
            ends.append((draws(found), {record.draw for record in found.replaced}, run.source.next_draw, found.metrics))
        return ends, [held.ask.draw for held in run.kept.held]

    told = made.on_ranks(ranks, work)
    seen = sorted(draw for ends, kept in told for draw in kept) + [
        draw for ends, _ in told for trained, refused, _, _ in ends for draw in (*trained, *refused)
    ]
    assert sorted(seen) == list(range(told[0][0][-1][2]))  # each draw in one place, none twice
    assert all([end[2:] for end in ends] == [end[2:] for end in told[0][0]] for ends, _ in told)  # cursor and metrics are agreed
    assert sum(len(kept) for _, kept in told) == told[0][0][-1][3]["partial"]["groups_kept"] <= 4 * (lag // updates)


def check(completion: Completion, lengths: Mapping[tuple[int, int], int], *, newest: int, lag: int) -> None:
    """Whole, as if it had been sampled at once, with a log-prob for every token, by versions that rise and are not too old."""
    wanted = min(LONGEST, lengths[completion.prompt.draw, completion.sample])
    ids, segments = completion.trace.ids, completion.trace.segments
    assert ids == (*range(1, wanted), wanted if wanted < lengths[completion.prompt.draw, completion.sample] else 0)
    assert completion.trace.logprobs is not None and len(completion.trace.logprobs) == wanted
    starts, versions = [start for start, _ in segments], [version for _, version in segments]
    assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < wanted
    assert versions == sorted(set(versions)) and newest - lag <= versions[0] and versions[-1] == completion.policy_version <= newest
    assert sum(stale(completion.trace, newest)) == (wanted if versions[-1] < newest else starts[-1])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sets", [BUDGET, BOTH, (*BUDGET, "rollout.dynamic={}")])
def test_a_resumed_run_goes_on_with_the_same_answers(made: SimpleNamespace, sets: tuple[str, ...], ranks: int) -> None:
    lengths = {(draw, sample): 1 + (7 * draw + 5 * sample) % 17 for draw in range(200) for sample in range(2)}

    def work(world: Any, resumed_after: int) -> list[Any]:
        run, ends = Run(made, world, lengths, *sets), []
        for number in range(1, 6):
            found = run.step()
            ends.append((traces(found.groups), found.metrics, run.source.next_draw))
            if number == resumed_after:
                state = run.state()
                assert state["kept"]["ranks"] != ["[]"] * ranks
                run = Run(made, world, lengths, *sets)
                run.load(state)
        return ends

    straight = made.on_ranks(ranks, lambda world: work(world, 0))
    assert all(made.on_ranks(ranks, lambda world, at=at: work(world, at)) == straight for at in (1, 3))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_on_another_number_of_ranks_the_answers_are_dealt_anew(made: SimpleNamespace, before: int, after: int) -> None:
    """None is lost or doubled, every rank has as many as the others but for one, and they are trained in time."""
    lengths = {(draw, sample): 1 + (7 * draw + 5 * sample) % 17 for draw in range(200) for sample in range(2)}

    def begin(world: Any) -> Any:
        run = Run(made, world, lengths, *BOTH)
        seen = [draw for _ in range(2) for draw in draws(run.step())]
        return seen, run.state()

    begun = made.on_ranks(before, begin)
    state = begun[0][1]
    assert all(other == state for _, other in begun)

    def go_on(world: Any) -> Any:
        run = Run(made, world, lengths, *BOTH)
        run.load(state)
        dealt = [held.ask.draw for held in run.kept.held]
        found = [run.step() for _ in range(3)]
        assert all(one.metrics["partial"]["groups_dropped"] == 0 and one.metrics["version_lag"]["max"] <= 2 for one in found)
        return dealt, [draw for one in found for draw in draws(one)] + [held.ask.draw for held in run.kept.held], run.source.next_draw

    ended = made.on_ranks(after, go_on)
    waiting = [item["ask"]["draw"] for part in state["kept"]["ranks"] for item in json.loads(part)]
    dealt = [draw for part, _, _ in ended for draw in part]
    assert sorted(dealt) == sorted(waiting) and max(len(part) for part, _, _ in ended) - min(len(part) for part, _, _ in ended) <= 1
    assert sorted([draw for seen, _ in begun for draw in seen] + [draw for _, seen, _ in ended for draw in seen]) == list(range(ended[0][2]))


def test_prompts_that_come_back_are_new_groups_behind_the_kept_ones(made: SimpleNamespace) -> None:
    """Rows 1, 4, 7, ... say nothing, so they come back a step later, under a draw of their own; what waits keeps its draw and its answers."""
    replay = "rollout.replay={after_steps: 1, share: 1.0}"
    run = Run(made, SoloWorld(), {(2, 0): 9}, *BUDGET, replay, replays=True)
    first = run.step()
    assert draws(first) == [0, 1, 3, 4] and [held.ask.draw for held in run.kept.held] == [2]
    second = run.step()
    assert second.metrics["replay"]["came_back"] == 2 and second.metrics["partial"]["groups_continued"] == 1
    assert {group.prompt.draw: group.prompt.row for group in second.groups} == {5: 1, 6: 4, 7: 5, 8: 6}
    everything = [draw for _ in range(3) for draw in draws(run.step())]
    assert len(everything) == len(set(everything)) and 2 in everything


def test_the_share_of_what_comes_back_is_of_the_prompts_that_are_asked_for(made: SimpleNamespace) -> None:
    """Every other answer goes on in the next step, so that a step asks for fewer prompts than it trains on. A quarter of them come back all the same,
    and of what is trained no more."""
    replay = "rollout.replay={after_steps: 1, share: 0.25}"
    run = Run(made, SoloWorld(), {(draw, 0): 6 for draw in range(0, 300, 2)}, *BUDGET, replay, replays=True)
    asked, came_back, trained, continued = 0, 0, 0, 0
    for _ in range(16):
        before = run.source.next_draw
        found = run.step()
        back = found.metrics["replay"]["came_back"]
        came_back, asked = came_back + back, asked + back + run.source.next_draw - before
        trained, continued = trained + len(found.groups), continued + found.metrics["partial"]["groups_continued"]
    assert continued > 8 and asked >= trained
    assert math.floor(0.25 * asked) - 3 <= came_back <= 0.25 * asked


def held(draw: int, version: int | None, tokens: int = 1) -> Held:
    pieces = () if version is None else (
        Piece(
            sample=0, text="a", text_with_special="a<e>", trace=TokenTrace(ids=(3,) * tokens, logprobs=(-0.5,) * tokens, segments=((0, version),)),
            finish=FinishReason.LENGTH, policy_version=version,
        ),
    )  # fmt: skip
    return Held(ask=Ask(draw=draw, turn=draw), pieces=pieces)


def kept_at(version: int, *, lag: int, updates: int = 1, world: Any = None) -> Kept:
    plan = PartialPlan(budget_tokens=2, max_version_lag=lag)
    return Kept(plan, world or SoloWorld(), updates=updates, newest=lambda: version, data="rows")


def test_steps_left() -> None:
    kept = kept_at(10, lag=7, updates=2)
    assert [kept.steps_left(version) for version in (None, 10, 9, 8, 7, 4, 3, 2)] == [3, 3, 3, 2, 2, 0, 0, -1]


@given(left=st.lists(st.integers(0, 4), max_size=12), places=st.integers(1, 4))
def test_what_has_to_be_trained_now_is_what_leaves_the_rest_in_time(left: list[int], places: int) -> None:
    """The reference: simulate steps that train the most urgent ones; the numbers are the least that make it end well, where anything does."""

    def in_time(waiting: list[int]) -> bool:
        waiting, step = sorted(waiting), 1
        while waiting:
            if waiting[0] < step:
                return False
            waiting, step = waiting[places:], step + 1
        return True

    urgent = sorted(left)
    least = next(count for count in range(len(left) + 1) if in_time(urgent[count:]))
    needed = must_now(left, places)
    assert max(needed.values(), default=0) == least
    assert all(count <= sum(item <= d for item in left) for d, count in needed.items())


def test_what_cannot_be_trained_in_time_is_dropped_and_counted(made: SimpleNamespace) -> None:
    """A shorter lag after a resume: version 0 is too old, and of three that are due now two find a place; the one with the fewest tokens goes."""
    kept = kept_at(3, lag=2)
    kept.keep([held(0, 0, 9), held(1, 1, 5), held(2, 1, 3), held(3, 1, 4), held(4, 3), held(5, None)])
    assert sorted(one.ask.draw for one in kept.give_up(places=2)) == [0, 2] and [one.ask.draw for one in kept.held] == [1, 3, 4, 5]
    run = Run(made, SoloWorld(), {}, *BUDGET)
    run.source.next_draw, run.sampler.version = 6, 9
    run.kept.keep([held(0, 0, 9), held(1, 8, 1)])
    found = run.step()
    assert found.metrics["partial"]["groups_dropped"] == 1 and found.metrics["partial"]["tokens_dropped"] == 9
    assert 1 in draws(found) and 0 not in draws(found)


def test_the_state_goes_through_json_bit_for_bit_and_knows_its_rows() -> None:
    kept = kept_at(3, lag=4)
    odd = TokenTrace(ids=(1, 2), logprobs=(-0.1, float("-inf")), mask=(True, False), segments=((0, 2), (1, 3)))
    piece = Piece(sample=-1, text="ä\n", text_with_special="ä\n<e>", trace=odd, finish=FinishReason.STOP, policy_version=3)
    kept.keep([Held(ask=Ask(draw=7, turn=5, returns=1), pieces=(piece,)), held(2, None)])
    state = json.loads(json.dumps(kept.state_dict()))
    other = kept_at(3, lag=4)
    other.load_state_dict(state)
    assert other.held == kept.held
    with pytest.raises(ResumeError, match="belong to other rows"):
        other.load_state_dict({**state, "data": "others"})


def test_longer_answers_and_more_samples_after_a_resume_grow_from_where_they_are(made: SimpleNamespace) -> None:
    """A cut answer of before is open again, and a sample that did not exist yet begins at its first token."""
    run = Run(made, SoloWorld(), {(0, 0): 9, (0, 1): 9}, "rollout={partial: {budget_tokens: 3}, max_version_lag: 3, max_new_tokens: 9}")
    run.source.next_draw, run.sampler.version = 1, 1
    cut = Piece(
        sample=0, text="", text_with_special="", trace=TokenTrace(ids=(1, 2, 3, 4), logprobs=(0.0,) * 4, segments=((0, 0),)),
        finish=FinishReason.LENGTH, policy_version=0,
    )  # fmt: skip
    run.kept.keep([Held(ask=Ask(draw=0, turn=0), pieces=(cut,))])
    trained = {draw: found for _ in range(4) for draw, found in traces(run.step().groups)}
    assert [trace.ids for trace in trained[0]] == [(*range(1, 9), 0)] * 2


def test_stale_tokens_are_those_of_older_segments() -> None:
    trace = TokenTrace(ids=(1, 2, 3, 4), segments=((0, 2), (1, 4), (3, 7)))
    assert stale(trace, 7) == [True, True, True, False] and stale(trace, 8) == [True] * 4 and stale(TokenTrace(ids=(), segments=((0, 1),)), 2) == []
