"""Which groups a step trains on: refill, replay, curriculum, best of n. The same for any number of ranks, bounded, counted, exact after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.data.curriculum import PassRates
from rftcli.engines.fake import FakeSampler
from rftcli.errors import ResumeError
from rftcli.plan.plan_sampling import DynamicPlan, KeepPlan, ReplayPlan
from rftcli.protocols import Roles
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected, collect
from rftcli.stages.credit import credit
from rftcli.stages.drawing import Drawing, Memory
from rftcli.stages.evaluate import settings_of_set
from rftcli.stages.keep import chosen
from rftcli.stages.outcomes import Ask, Outcome, metric_of
from rftcli.stages.refill import accepts
from rftcli.stages.replay import Replay
from rftcli.types import Completion, PartScore, Prompt, Request, SamplingSettings

SETS = ("batch.prompts_per_step=8", "rollout.samples_per_prompt=4")


class Rows:
    """A source of `rows` rows, in order, over and over."""

    def __init__(self, made: SimpleNamespace, rows: int = 1000) -> None:
        self.next_draw, self.num_rows = 0, rows
        self._made = made

    def draw(self, first: int, count: int) -> Sequence[Prompt]:
        return [self._made.prompt(turn) for turn in range(first, first + count)]

    def row(self, turn: int) -> Any:
        return SimpleNamespace(source="n", index=turn % self.num_rows)

    def state_dict(self) -> Mapping[str, Any]:
        return {"next_draw": self.next_draw}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_draw = state["next_draw"]


def fake() -> FakeSampler:
    return FakeSampler(lambda ids, skip_special_tokens=True: " ".join(map(str, ids)), vocab_size=11, eos_ids=(0,))


def flat_where(says: Callable[[Prompt], bool]) -> Callable[[Completion], float]:
    """Reward 1 for sample 0 alone, but 0 for all where `says`."""
    return lambda completion: float(completion.sample == 0 and not says(completion.prompt))


def step_of(
    made: SimpleNamespace, world: Any, source: Rows, reward: Callable[[Completion], float | None], *sets: str, step: int = 1, memory: Any = None
) -> Collected:
    plan = made.plan(*SETS, *sets, ranks=world.size)
    found = {} if memory is None else {"memory": memory}
    return collect(source, fake(), made.Scores(reward), plan, world, step=step, clock=lambda: 0.0, tick=lambda *_: None, **found)


def draws(found: Collected) -> list[int]:
    return [group.prompt.draw for group in found.groups]


def test_the_kth_empty_place_gets_the_kth_next_draw(made: SimpleNamespace) -> None:
    """Draws 1 and 4 say nothing, and neither does 8, which comes for 1: places 1 and 4 end with 10 and 9."""
    source = Rows(made)
    found = step_of(made, SoloWorld(), source, flat_where(lambda prompt: prompt.draw in (1, 4, 8)), "rollout.dynamic={}")
    assert sorted(draws(found)) == [0, 2, 3, 5, 6, 7, 9, 10] and source.next_draw == 11
    assert found.metrics["dynamic"] == {
        "extra_rollouts": 2, "groups_rejected": 3, "groups_accepted": 8, "groups_without_signal": 0, "groups_unscored": 0,
        "tokens_rejected": sum(record.tokens for record in found.replaced), "reward_mean_sampled": pytest.approx(8 / 44),
    }  # fmt: skip
    assert sorted({record.draw for record in found.replaced}) == [1, 4, 8] and len(found.replaced) == 12


def test_after_the_last_extra_rollout_the_step_goes_on_with_what_it_has(made: SimpleNamespace) -> None:
    source = Rows(made)
    found = step_of(made, SoloWorld(), source, flat_where(lambda prompt: prompt.draw != 0), "rollout.dynamic={max_extra_rollouts: 2}")
    assert len(found.groups) == 8 and source.next_draw == 8 + 7 + 7
    told = found.metrics["dynamic"]
    assert (told["extra_rollouts"], told["groups_rejected"], told["groups_without_signal"], told["groups_accepted"]) == (2, 14, 7, 1)
    assert sorted(draws(found)) == [0, *range(15, 22)]  # the last ones that came


def test_without_dynamic_sampling_nothing_is_replaced_and_nothing_told(made: SimpleNamespace) -> None:
    source = Rows(made)
    found = step_of(made, SoloWorld(), source, lambda _: 0.0)
    assert sorted(draws(found)) == list(range(8)) and source.next_draw == 8 and found.metrics == {} and found.replaced == ()


@settings(max_examples=25, deadline=None)
@given(empty=st.sets(st.integers(0, 40)), extra=st.integers(1, 4), steps=st.integers(1, 3), updates=st.sampled_from([1, 2]))
def test_any_number_of_ranks_trains_on_the_same_groups(made: SimpleNamespace, empty: set[int], extra: int, steps: int, updates: int) -> None:
    """The reference: fill places in rounds, one list for all. Bit for bit the same samples, cursor and metrics on 1, 2 and 4 ranks."""
    reward = flat_where(lambda prompt: prompt.draw in empty)
    options = (f"rollout.dynamic={{max_extra_rollouts: {extra}}}", f"batch.updates_per_step={updates}")

    def work(world: Any) -> list[Any]:
        source, ends = Rows(made), []
        for step in range(1, steps + 1):
            found = step_of(made, world, source, reward, *options, step=step)
            groups = {group.prompt.draw: [sample.completion.trace for sample in group.samples] for group in found.groups}
            assert [len(mini_batch) for mini_batch in found.mini_batches] == [8 // updates // world.size] * updates
            ends.append((groups, source.next_draw, found.metrics))
        return ends

    solo = work(SoloWorld())
    cursor = 0
    for groups, next_draw, _ in solo:
        place = list(range(cursor, cursor + 8))
        cursor += 8
        for _ in range(extra):
            for index in [index for index, draw in enumerate(place) if draw in empty]:
                place[index] = cursor
                cursor += 1
        assert set(groups) == set(place) and next_draw == cursor
    for size in (2, 4):
        ranks = made.on_ranks(size, work)
        for number, (groups, next_draw, metrics) in enumerate(solo):
            together = [ends[number] for ends in ranks]
            assert {draw: traces for part, _, _ in together for draw, traces in part.items()} == groups
            assert sum(len(part) for part, _, _ in together) == 8 and all(len(part) == 8 // size for part, _, _ in together)
            assert all((cursor_there, told) == (next_draw, metrics) for _, cursor_there, told in together)


@pytest.mark.parametrize(
    ("rewards", "low", "high", "accepted"),
    [
        ([1.0, 0.0, 0.0, 0.0], None, None, True), ([0.1] * 8, None, None, False), ([1.0, None, None, None], None, None, False),
        ([None] * 4, None, None, False), ([1.0, None, 0.0, None], None, None, True), ([1.0, 1.0, 1.0, 0.0], 0.1, 0.7, False),
        ([1.0, 1.0, 1.0, 0.0], 0.1, 0.75, True), ([1.0, 0.0, 0.0, 0.0], 0.25, None, True), ([1.0, 0.0, 0.0, 0.0], 0.26, None, False),
        ([1e6, 1e6 + 0.1], None, None, False),
    ],
)  # fmt: skip
def test_what_says_something(made: SimpleNamespace, rewards: list[float | None], low: float | None, high: float | None, accepted: bool) -> None:
    (group,) = made.groups({0: rewards})
    assert accepts(group, DynamicPlan(max_extra_rollouts=1, low=low, high=high, metric="reward")) is accepted


def test_the_metric_may_be_a_part(made: SimpleNamespace) -> None:
    """A spread that comes from the length alone is none of the answer."""

    def parts(right: float | None, length: float) -> list[PartScore]:
        return [PartScore(name=name, value=value, weight=1.0, seconds=0.0) for name, value in (("right", right), ("length", length))]

    samples = [made.sample(0, index, 1.0 + index, parts=parts(1.0, index)) for index in range(3)]
    group = SimpleNamespace(prompt=made.prompt(0), samples=samples)
    plan = {"max_extra_rollouts": 1, "low": None, "high": None}
    assert accepts(group, DynamicPlan(metric="reward", **plan)) and not accepts(group, DynamicPlan(metric="right", **plan))  # type: ignore[arg-type]
    group.samples = [*samples, made.sample(0, 3, 1.0, parts=parts(None, 1.0)), made.sample(0, -1, 9.0, parts=parts(0.0, 1.0))]
    assert metric_of(group, "right") == (1.0, 1.0, 1.0, None)  # type: ignore[arg-type]


def test_groups_that_cannot_be_scored_are_refilled_and_their_failures_counted(made: SimpleNamespace) -> None:
    found = step_of(
        made, SoloWorld(), Rows(made), lambda c: None if c.prompt.draw == 3 else float(c.sample == 0), "rollout.dynamic={max_extra_rollouts: 1}"
    )
    assert 3 not in draws(found) and found.metrics["dynamic"]["groups_unscored"] == 1
    assert [record.reward for record in found.replaced] == [None] * 4 and all(record.parts[0].error for record in found.replaced)


def test_a_rank_that_is_full_waits_for_the_others(made: SimpleNamespace) -> None:
    """Refills of one rank's places alone: the others make the same rounds and call their engine for nothing, as it may be one over several ranks."""
    calls: list[int] = []

    class Counted(FakeSampler):
        def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
            calls.append(len(requests))
            yield from super().generate(requests, settings)

    plan = made.plan(*SETS, "rollout.dynamic={}", ranks=2)

    def work(world: Any) -> list[int]:
        scores = made.Scores(flat_where(lambda prompt: prompt.draw == 0))
        engine = Counted(lambda ids, skip_special_tokens=True: "", vocab_size=11, eos_ids=(0,))
        return draws(collect(Rows(made), engine, scores, plan, world, step=1, clock=lambda: 0.0, tick=lambda *_: None))

    ranks = made.on_ranks(2, work)
    assert sorted(calls) == [0, 1, 4, 4] and sorted(ranks[0] + ranks[1]) == list(range(1, 9))


# Replay


def replay(**changes: Any) -> Replay:
    return Replay(ReplayPlan(**{"after_steps": 2, "times": 1, "share": 0.5, "max_waiting": 3, "below": None, **changes}), data="d")


def outcome(turn: int, rewards: Sequence[float | None], returns: int = 0, **changes: Any) -> Outcome:
    fields = {"slot": 0, "source": "n", "row": turn, "row_id": "r", "label": "default", "tokens": 1, "accepted": True, "values": tuple(rewards)}
    return Outcome(ask=Ask(draw=turn, turn=turn, returns=returns), rewards=tuple(rewards), **{**fields, **changes})


def test_prompts_without_signal_come_back_once_and_in_order() -> None:
    memory = replay()
    memory.after(1, [outcome(4, [0.0, 0.0]), outcome(5, [1.0, 0.0]), outcome(6, [None, None]), outcome(7, [1.0, 1.0, None])])
    assert memory.take(2, 8) == []
    assert [(item.turn, item.returns) for item in memory.take(3, 8)] == [(4, 1), (7, 1)] and memory.take(3, 8) == []
    memory.after(3, [outcome(4, [0.0, 0.0], returns=1)])
    assert memory.metrics() == {"waiting": 0, "given_up": 1}


def test_replay_is_bounded() -> None:
    memory = replay(below=0.5)
    memory.after(1, [outcome(turn, [0.0, 0.0]) for turn in range(5)])
    assert memory.metrics() == {"waiting": 3, "given_up": 2}
    memory.after(1, [outcome(9, [1.0, 1.0])])  # solved, and only those below a half come back
    assert [item.turn for item in memory.take(3, 4)] == [0, 1]  # half of four
    assert [item.turn for item in memory.take(4, 4)] == [2]


@given(places=st.lists(st.integers(0, 9), max_size=30), share=st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.7, 1.0]))
def test_the_share_holds_over_steps_of_any_size(places: list[int], share: float) -> None:
    """As where `partial` asks for few prompts a step: over the steps the share is reached whatever their size, and never passed."""
    memory = replay(share=share, max_waiting=1000)
    memory.after(0, [outcome(turn, [0.0, 0.0]) for turn in range(300)])
    came_back, asked = 0, 0
    for count in places:
        other = replay(share=share, max_waiting=1000)
        other.load_state_dict(memory.state_dict())
        taken = memory.take(9, count)
        assert other.take(9, count) == taken and len(taken) <= min(count, math.ceil(share * count + 1e-9))
        came_back, asked = came_back + len(taken), asked + count
        assert math.floor(share * asked + 1e-6) - 1 <= came_back <= share * asked + 1e-6


def test_a_share_of_few_places_is_not_lost_nor_saved_up() -> None:
    memory = replay(share=0.25, max_waiting=1000)
    assert [len(memory.take(step, 2)) for step in range(10)] == [0] * 10  # nobody waits
    memory.after(0, [outcome(turn, [0.0, 0.0]) for turn in range(20)])
    assert [len(memory.take(step, 2)) for step in range(10, 18)] == [0, 1] * 4


def test_a_prompt_that_comes_back_is_another_group(made: SimpleNamespace) -> None:
    """Row 2 says nothing in step 1 and comes back in step 3 under a draw of its own; no row of the source is lost to it."""
    source, memory = Rows(made), Memory(replay=replay())
    seen: list[tuple[int, str]] = []
    for step in range(1, 5):
        found = step_of(made, SoloWorld(), source, flat_where(lambda prompt: prompt.row == 2), step=step, memory=memory)
        seen += [(group.prompt.draw, group.prompt.row_id) for group in found.groups]
    assert sorted(draw for draw, _ in seen) == list(range(32)) and source.next_draw == 31
    assert sorted(int(row.removeprefix("n:")) for _, row in seen) == sorted([*range(31), 2])
    assert found.metrics["replay"] == {"came_back": 0, "waiting": 0, "given_up": 1}


def test_what_waits_belongs_to_its_data() -> None:
    memory, other = replay(), Replay(replay()._plan, data="other")
    memory.after(1, [outcome(4, [0.0, 0.0])])
    with pytest.raises(ResumeError, match="other rows"):
        other.load_state_dict(memory.state_dict())


# Curriculum


def rates(**changes: Any) -> PassRates:
    fields = {"low": 0.2, "high": 0.8, "share": 0.0, "metric": "reward", "pass_mark": 1.0, "memory": 0.5, "seed": 0, "data": "d"}
    return PassRates(**{**fields, **changes})


def test_pass_rates_are_running_means() -> None:
    measured = rates()
    measured.after(1, [outcome(3, [1.0, 1.0, 0.5, None])])
    assert measured.rates == {"n:3": pytest.approx(2 / 3)}
    measured.after(2, [outcome(3, [0.0, 0.0]), outcome(4, [None, None])])
    assert measured.rates == {"n:3": pytest.approx(1 / 3)}
    assert measured.metrics() == {"rows_measured": 1, "pass_rate": pytest.approx(1 / 3), "inside_fraction": 1.0}
    again = rates()
    again.load_state_dict(json.loads(json.dumps(measured.state_dict())))
    assert again.rates == measured.rates
    with pytest.raises(ResumeError, match="other rows"):
        rates(data="e").load_state_dict(measured.state_dict())


def test_known_rows_outside_the_range_are_passed_over(made: SimpleNamespace) -> None:
    """Ten rows; row 0 is never solved and row 1 always. From the second pass on both are left out, and the cursor counts them."""
    source, memory = Rows(made, rows=10), Memory(curriculum=rates())

    def reward(completion: Completion) -> float:
        row = completion.prompt.row % 10
        return float(row == 1 or (row > 1 and completion.sample < 2))

    found = [step_of(made, SoloWorld(), source, reward, step=step, memory=memory) for step in (1, 2, 3)]
    assert sorted(draws(found[0])) == list(range(8))
    assert sorted(draws(found[1])) == [8, 9, 12, 13, 14, 15, 16, 17]  # 10 and 11 are rows 0 and 1 again
    assert [item.metrics["curriculum"]["passed_over"] for item in found] == [0, 2, 2] and source.next_draw == 28


def test_some_of_them_are_drawn_all_the_same_by_key() -> None:
    measured = rates(share=0.25)
    measured.after(1, [outcome(0, [0.0, 0.0])])
    row = SimpleNamespace(source="n", index=0)
    taken = [measured.takes(row, turn) for turn in range(4000)]  # type: ignore[arg-type]
    assert sum(taken) == pytest.approx(1000, abs=110)  # four standard deviations
    assert taken == [measured.takes(row, turn) for turn in range(4000)] != [rates(seed=1, share=0.25).takes(row, turn) for turn in range(4000)]  # type: ignore[arg-type]


def test_a_curriculum_that_takes_nothing_does_not_hang(made: SimpleNamespace) -> None:
    source = Rows(made, rows=5)
    measured = rates()
    measured.after(1, [outcome(turn, [0.0, 0.0]) for turn in range(5)])
    drawing = Drawing(source, Memory(curriculum=measured), 1)  # type: ignore[arg-type]
    assert [ask.turn for ask in drawing.fresh(2)] == [5, 11]


# All together


def test_a_resumed_run_goes_on_exactly(made: SimpleNamespace) -> None:
    """Through JSON, as the registry of a checkpoint: after every step, on one rank and on two, the rest is what it would have been."""
    sets = ("rollout.dynamic={max_extra_rollouts: 1}",)

    def reward(completion: Completion) -> float:
        return float(completion.trace.ids[0] % 3 == 0 and completion.prompt.row % 4 > 0)

    def parts() -> tuple[Rows, Replay, PassRates]:
        return Rows(made, rows=20), replay(after_steps=1, max_waiting=50), rates(share=0.3)

    def steps(world: Any, source: Rows, waiting: Replay, measured: PassRates, first: int) -> list[Any]:
        ends = []
        for step in range(first, 6):
            found = step_of(made, world, source, reward, *sets, step=step, memory=Memory(replay=waiting, curriculum=measured))
            groups = sorted(
                (group.prompt.draw, group.prompt.row_id, [sample.completion.trace.ids for sample in group.samples])
                for part in world.gather(found.groups)
                for group in part
            )
            states = json.dumps([dict(item.state_dict()) for item in (source, waiting, measured)])
            ends.append((groups, found.metrics, states))
        return ends

    straight = steps(SoloWorld(), *parts(), 1)
    assert any(metrics["replay"]["came_back"] for _, metrics, _ in straight) and any(m["curriculum"]["passed_over"] for _, m, _ in straight)
    assert any(metrics["dynamic"]["groups_rejected"] for _, metrics, _ in straight)
    identities = [draw for groups, _, _ in straight for draw, _, _ in groups]
    assert len(set(identities)) == len(identities)
    for ends in made.on_ranks(2, lambda world: steps(world, *parts(), 1)):
        assert ends == straight
    for done in range(1, 5):
        fresh = parts()
        for item, state in zip(fresh, json.loads(straight[done - 1][2]), strict=True):
            item.load_state_dict(state)
        assert steps(SoloWorld(), *fresh, done + 1) == straight[done:]


# Best of n


@pytest.mark.parametrize(
    ("rewards", "best", "worst", "expected"),
    [
        ([0.1, 0.9, 0.5, 0.3], 1, 1, {1, 0}), ([0.1, 0.9, 0.5, 0.3], 2, 0, {1, 2}), ([0.1, 0.9, 0.5, 0.3], 0, 3, {0, 3, 2}),
        ([1.0, 1.0, 0.0, 0.0], 1, 1, {0, 3}), ([None, 0.5, None, 0.2], 1, 1, {1, 3}), ([None, 0.5, None, None], 2, 1, {1}),
        ([None, None, None, None], 1, 1, {0}), ([0.2, 0.2, 0.2, 0.2], 2, 1, {0, 1, 3}),
    ],
)  # fmt: skip
def test_the_best_and_the_worst(made: SimpleNamespace, rewards: list[float | None], best: int, worst: int, expected: set[int]) -> None:
    (group,) = made.groups({0: rewards})
    assert chosen(group, KeepPlan(best=best, worst=worst)) == expected


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_kept_has_the_advantage_of_its_whole_group(made: SimpleNamespace, size: int) -> None:
    """[0, 1, 2, 3] of a mean of 1.5: the kept ones, 3 and 0, have the advantages that grpo gives them among all four."""
    plan = made.plan(*SETS, "rollout.keep={best: 1, worst: 1}", ranks=size)

    def work(world: Any) -> Any:
        scores = made.Scores(lambda completion: float(completion.sample))
        found = collect(Rows(made), fake(), scores, plan, world, step=1, clock=lambda: 0.0, tick=lambda *_: None)
        credited = credit(found, Roles(policy=None), plan, world, pad_id=0, device=torch.device("cpu"))
        assert all(len(group.samples) == 4 for group in found.groups)
        return [experience for mini_batch in credited.mini_batches for experience in mini_batch]

    kept = [experience for rank in (made.on_ranks(size, work) if size > 1 else [work(SoloWorld())]) for experience in rank]
    assert len(kept) == 16 and {experience.sample.completion.sample for experience in kept} == {0, 3}
    std = (5 / 3) ** 0.5
    for experience in kept:
        expected = (1.5 if experience.sample.completion.sample == 3 else -1.5) / (std + 1e-4)
        assert experience.advantages.tolist() == pytest.approx([expected] * len(experience.advantages))


# Labels


class Labelled(Rows):
    def draw(self, first: int, count: int) -> Sequence[Prompt]:
        return [self._made.prompt(turn, label="code" if turn % 2 else "math") for turn in range(first, first + count)]


def test_labels_are_sampled_in_their_own_way(made: SimpleNamespace) -> None:
    asked: dict[str, tuple[SamplingSettings, list[int]]] = {}

    class Noted(FakeSampler):
        def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Iterator[Completion]:
            (label,) = {request.prompt.label for request in requests}
            asked[label] = (settings, sorted(request.prompt.draw for request in requests))
            yield from super().generate(requests, settings)

    own = "rollout.by_label={code: {temperature: 0.5, top_p: 0.9, max_new_tokens: 2, stop: [x]}}"
    plan = made.plan(*SETS, own, "rollout={first_token_temperature: 4.0, temperature: 0.8, stop_token_ids: [7]}")
    engine = Noted(lambda ids, skip_special_tokens=True: "", vocab_size=11, eos_ids=(0,))
    scores = made.Scores(lambda completion: float(completion.sample))
    found = collect(Labelled(made), engine, scores, plan, SoloWorld(), step=1, clock=lambda: 0.0, tick=lambda *_: None)
    assert {label: draws for label, (_, draws) in asked.items()} == {"math": [0, 2, 4, 6], "code": [1, 3, 5, 7]}
    code, math = asked["code"][0], asked["math"][0]
    assert (code.temperature, code.top_p, code.max_new_tokens, code.stop, code.stop_token_ids) == (0.5, 0.9, 2, ("x",), (7,))
    assert (math.temperature, math.top_p, math.max_new_tokens, math.stop) == (0.8, 1.0, 4, ())
    assert code.first_token_temperature == math.first_token_temperature == 4.0
    assert max(len(sample.completion.trace.ids) for group in found.groups if group.prompt.label == "code" for sample in group.samples) == 2

    credited = credit(found, Roles(policy=None), plan, SoloWorld(), pad_id=0, device=torch.device("cpu"))
    for experience in (experience for mini_batch in credited.mini_batches for experience in mini_batch):
        rest = 0.5 if experience.sample.completion.prompt.label == "code" else 0.8
        assert experience.temperatures is not None
        assert experience.temperatures.tolist() == pytest.approx([4.0, *[rest] * (len(experience.mask) - 1)])


def test_one_temperature_is_no_vector(made: SimpleNamespace) -> None:
    found = step_of(made, SoloWorld(), Rows(made), lambda c: float(c.sample))
    for sets in ((), ("rollout.by_label={default: {top_p: 0.9}}",)):
        credited = credit(found, Roles(policy=None), made.plan(*SETS, *sets), SoloWorld(), pad_id=0, device=torch.device("cpu"))
        assert all(experience.temperatures is None for mini_batch in credited.mini_batches for experience in mini_batch)


def test_evaluation_knows_nothing_of_it(made: SimpleNamespace) -> None:
    held_out = "data.eval.e={path: e.jsonl, label: default}"
    plain = made.plan(held_out)
    full = made.plan(
        held_out, "rollout={dynamic: {}, keep: {best: 1, worst: 0}, replay: {}, first_token_temperature: 9.0, by_label: {default: {top_p: 0.5}}}",
        "data.curriculum={}", "rollout.by_label.default={temperature: 0.1, stop: [x]}",
    )  # fmt: skip
    assert settings_of_set(full, "e") == settings_of_set(plain, "e")
