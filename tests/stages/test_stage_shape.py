"""Shaping: the order of math.md's section 1 in numbers, moments over ranks and resumes, masks that leave everything."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.shaping import clipped, normalised, overlong_penalty, truncated_reward
from rftcli.algo.stats import Moments
from rftcli.engines.fake import FakeSampler
from rftcli.observe.lessons import LessonState, lessons
from rftcli.plan.plan import RewardPlan, ShapingPlan
from rftcli.rewards.failures import count_failures
from rftcli.rewards.spec import CombineSpec, PartSpec
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected
from rftcli.stages.credit import step_advantages
from rftcli.stages.evaluate import EvalSet, evaluate
from rftcli.stages.held_out_metrics import _full_mark
from rftcli.stages.records import records_of, reward_metrics, sample_line
from rftcli.stages.shape import RunningNorm, penalised, shape
from rftcli.types import FinishReason, Group, PartScore


def collected(*mini_batches: list[Group]) -> Collected:
    return Collected(mini_batches=tuple(map(tuple, mini_batches)), rollout_seconds=0.0, score_seconds=0.0)


def rewards_of(found: Collected) -> list[float | None]:
    return [sample.reward for group in found.groups for sample in group.samples]


def shaped(groups: list[Group], running: RunningNorm | None = None, **fields: Any) -> Collected:
    return shape(collected(groups), ShapingPlan(**fields), running or RunningNorm(), SoloWorld())


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_the_overlong_penalty(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, limit=100, buffer=20) == pytest.approx(penalty, abs=1e-15)


@given(tokens=st.integers(0, 500), limit=st.integers(1, 300), share=st.floats(0.01, 1.0))
def test_it_falls_from_nothing_to_one_and_never_rises(tokens: int, limit: int, share: float) -> None:
    buffer = max(1, int(limit * share))
    here, longer = (overlong_penalty(count, limit, buffer) for count in (tokens, tokens + 1))
    assert -1.0 <= longer <= here <= 0.0
    assert (here == 0.0) == (tokens <= limit - buffer)


def test_pure_functions_at_their_edges() -> None:
    assert normalised(3.0, 1.0, 1e-9, centre=True) == 3.0
    assert (clipped(-1.0, -1.0, 2.0), clipped(5.0, -1.0, 2.0)) == (-1.0, 2.0)
    assert (truncated_reward(0.0, 0.5), truncated_reward(-2.0, 0.5), truncated_reward(2.0, 0.0)) == (0.0, -2.0, 0.0)


def test_nothing_asked_for_changes_nothing(made: SimpleNamespace) -> None:
    before = collected(made.groups({0: [1.0, 0.0]}))
    assert shape(before, ShapingPlan(), RunningNorm(), SoloWorld()) is before


def test_the_order_of_everything(made: SimpleNamespace) -> None:
    """factor, then the missing end, then length, then the running deviation, then the bounds."""
    ended = made.sample(0, 0, 1.0, ids=(1,) * 9)
    cut = made.sample(0, 1, 1.0, ids=(1,) * 10, finish=FinishReason.LENGTH)
    lost = made.sample(0, 2, -1.0, ids=(1,) * 2, finish=FinishReason.ABORT)
    group = Group(prompt=ended.completion.prompt, samples=(ended, cut, lost))
    plan = {"truncated": "penalise", "truncated_factor": 0.5, "missing_eos_penalty": 0.2, "overlong_buffer": 4, "overlong_factor": 0.4}
    found = shaped([group], max_new_tokens=10, **plan)
    before_norm = [1.0 - 0.4 * 0.75, 0.5 - 0.2 - 0.4, -1.0 - 0.2]
    assert rewards_of(found) == pytest.approx(before_norm)
    assert [sample.shaped.penalty for sample in found.groups[0].samples] == pytest.approx([-0.3, -1.1, -0.2])
    assert [sample.combined for sample in found.groups[0].samples] == [1.0, 1.0, -1.0]
    std = Moments.of(before_norm).population_std
    found = shaped([group], max_new_tokens=10, running_norm="scale", clip=(-1.0, 0.5), **plan)
    expected = [value / std for value in before_norm]
    assert expected[0] > 0.5 and expected[2] < -1.0
    assert rewards_of(found) == pytest.approx([0.5, expected[1], -1.0])
    metrics = reward_metrics(records_of(found.groups))
    assert metrics["reward_clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["overlong_penalty_mean"] == pytest.approx((-0.3 - 0.4 - 0.0) / 3)
    assert (metrics["reward_mean"], metrics["reward_min"], metrics["reward_max"]) == (pytest.approx(1 / 3), -1.0, 1.0)
    assert metrics["shaped_reward_mean"] == pytest.approx((0.5 + expected[1] - 1.0) / 3)


def test_bounds_are_those_of_what_was_normalised(made: SimpleNamespace) -> None:
    """4 and 0 have the deviation 2: 4 becomes 2, which lies within [0, 3]; bounded first it would be 1.5."""
    assert rewards_of(shaped(made.groups({0: [4.0, 0.0]}), running_norm="scale", clip=(0.0, 3.0))) == [2.0, 0.0]


def test_running_moments_include_this_step_and_all_before(made: SimpleNamespace) -> None:
    running = RunningNorm()
    first = shaped(made.groups({0: [0.0, 1.0, 1.0, 0.0]}), running, running_norm="scale")
    assert (running.moments.mean, running.moments.population_std) == (0.5, 0.5)
    assert rewards_of(first) == [0.0, 2.0, 2.0, 0.0]
    second = shaped(made.groups({1: [0.0, 1.0, None]}), running, running_norm="full")
    assert running.moments.count == 6 and rewards_of(second) == pytest.approx([-1.0, 1.0, None])
    assert rewards_of(shaped(made.groups({0: [3.0, 3.0]}), running_norm="full")) == [3.0, 3.0]  # no deviation yet: as they are


def test_evaluation_neither_moves_the_moments_nor_reads_them(made: SimpleNamespace) -> None:
    """Fed 0, 1, 1, 0 in training; four held-out rewards of 10 would make it mean 5.25 and deviation 4.76, and be 19 as normalised ones."""
    plan = made.plan("reward_shaping={running_norm: full, clip: [-1, 1]}", "rollout.engine=fake", "data.eval.held_out={path: held_out.jsonl}")
    running = RunningNorm()
    shape(collected(made.groups({0: [0.0, 1.0], 1: [1.0, 0.0]})), plan.shaping, running, SoloWorld())
    engine = FakeSampler(lambda ids, skip_special_tokens=True: "a", vocab_size=9, eos_ids=(0,))
    sets = [EvalSet(name="held_out", prompts=[made.prompt(row) for row in range(4)], samples_per_prompt=1)]
    for step in range(1, 4):
        found = evaluate(
            sets, engine, made.Scores(lambda _: 10.0), plan, SoloWorld(), step=step, tick=lambda *_: None, write=lambda line: None
        )
        assert found["held_out"]["mean@1"]["value"] == 10.0
        assert (running.moments.count, running.moments.mean, running.moments.population_std) == (4, 0.5, 0.5)
    assert rewards_of(shaped(made.groups({2: [1.0, 0.0]}), running, running_norm="full")) == [1.0, -1.0]
    assert running.moments.count == 6


def test_moments_survive_a_resume_to_the_last_bit(made: SimpleNamespace) -> None:
    straight, first = RunningNorm(), RunningNorm()
    steps = [{0: [0.1, 0.7]}, {1: [1 / 3, -2.2]}, {2: [5.5, 0.01]}]
    for rewards in steps:
        shaped(made.groups(rewards), straight, running_norm="scale")
    shaped(made.groups(steps[0]), first, running_norm="scale")
    resumed = RunningNorm()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for rewards in steps[1:]:
        shaped(made.groups(rewards), resumed, running_norm="scale")
    assert resumed.moments == straight.moments


def test_ranks_see_the_same_moments_bit_for_bit(made: SimpleNamespace) -> None:
    rewards = {0: [0.1, 0.2], 1: [0.7, 1 / 3], 2: [-4.0, 2.5], 3: [9.9, 0.3]}
    alone = RunningNorm()
    expected = rewards_of(shaped(made.groups(rewards), alone, running_norm="full"))

    def work(world: Any) -> tuple[Moments, list[float | None]]:
        running = RunningNorm()
        mine = made.groups({draw: values for draw, values in rewards.items() if draw % 2 == world.rank})
        found = shape(collected(mine), ShapingPlan(running_norm="full"), running, world)
        return running.moments, rewards_of(found)

    (moments, even), (others, odd) = made.on_ranks(2, work)
    assert moments == others == alone.moments
    assert expected == [*even[:2], *odd[:2], *even[2:], *odd[2:]]


def test_a_masked_answer_leaves_baseline_and_counts_as_no_failure(made: SimpleNamespace) -> None:
    cut = made.sample(0, 2, 1.0, finish=FinishReason.LENGTH)
    group = Group(prompt=cut.completion.prompt, samples=(made.sample(0, 0, 1.0), made.sample(0, 1, 0.0), cut))
    running = RunningNorm()
    found = shaped([group], running, truncated="mask", running_norm="scale")
    assert running.moments.count == 2 and rewards_of(found)[2] is None
    advantages = step_advantages(found.groups, made.plan("algorithm.advantage.kind=rloo").advantage, SoloWorld())
    assert set(advantages) == {(0, 0), (0, 1)} and advantages[(0, 0)] == pytest.approx(2.0)
    records = records_of(found.groups)
    assert count_failures(records) == (3, {})
    metrics = reward_metrics(records)
    assert (metrics["samples_masked"], metrics["samples_dropped"], metrics["reward_mean"]) == (1, 0, pytest.approx(2 / 3))


def test_a_sample_without_a_reward_stays_without(made: SimpleNamespace) -> None:
    found = shaped(made.groups({0: [None, 1.0]}), clip=(0.0, 0.5), missing_eos_penalty=1.0)
    assert rewards_of(found) == [None, 0.5]
    assert count_failures(records_of(found.groups)) == (2, {"p: broke": 1})


def test_metrics_of_a_step(made: SimpleNamespace) -> None:
    groups = made.groups({0: [1.0, 0.0, 0.0, 0.0], 1: [1.0, 1.0], 2: [0.5, None]})
    metrics = reward_metrics(records_of(groups))
    assert metrics["group_reward_std"] == pytest.approx((0.5 + 0.0) / 2)
    assert (metrics["reward_min"], metrics["reward_max"]) == (0.0, 1.0)
    assert not {"shaped_reward_mean", "reward_clip_fraction", "user"} & set(metrics)


def test_what_functions_measured_is_averaged_over_all_that_did(made: SimpleNamespace) -> None:
    first, second = records_of(made.groups({0: [1.0, 0.0]}))
    logged = [replace(first, metrics=(("length", 4.0), ("rare", 1.0))), replace(second, metrics=(("length", 1.0), ("length", 1.0)))]
    assert reward_metrics(logged)["user"] == {"length": 2.0, "rare": 1.0}


def test_what_only_some_lines_of_the_samples_have(made: SimpleNamespace) -> None:
    cut = replace(made.sample(0, 0, 1.0, finish=FinishReason.LENGTH), extra={"level": 3}, metrics=(("m", 1.0),), error="no idea")
    line = sample_line(penalised(cut, ShapingPlan(truncated="mask")), step=1, advantage=None)
    assert (line["reward"], line["combined"], line["masked"], line["extra"], line["metrics"]) == (None, 1.0, True, {"level": 3}, [["m", 1.0]])
    assert line["error"] == "no idea" and line["completion"].removesuffix(line["special_end"]) == cut.completion.text


@pytest.mark.parametrize(
    ("how", "weights", "expected"),
    [("sum", (0.5, 0.25, -1.0), 0.75), ("product", (0.5, 0.5), 0.25), ("min", (0.5, 0.2), 0.2), ("gate", (1.0, 0.5, 0.25), 0.75),
     ("python", (3.0,), 1.0), ("product", (1.0, -1.0), None), ("sum", (-1.0,), None)],
)  # fmt: skip
def test_full_marks_of_every_way_to_combine(how: str, weights: tuple[float, ...], expected: float | None) -> None:
    parts = tuple(PartSpec(name=str(index), kind="rule", target="exact", weight=weight) for index, weight in enumerate(weights))
    table = RewardPlan(labels={"a": parts}, max_error_rate=0, score_prefill=True, search_path="/", combine={"a": CombineSpec(how=how)})
    assert _full_mark(table, "a") == (None if expected is None else pytest.approx(expected))


def test_a_part_that_abstains_unevenly_is_told_once(made: SimpleNamespace) -> None:
    def with_part(sample: int, value: float | None) -> Any:
        return made.sample(0, sample, 1.0, parts=[PartScore(name="style", value=value, weight=1.0, seconds=0.0)])

    group = Group(prompt=made.prompt(0), samples=(with_part(0, 1.0), with_part(1, None)))
    metrics, state = reward_metrics(records_of([group])), LessonState(on_policy=True)
    (code, text), = [found for found in lessons(metrics, state) if found[0] == "part_uneven"]
    assert "part `style`" in text and "in 1 groups" in text and code == "part_uneven"
    assert not [found for found in lessons(metrics, state) if found[0] == "part_uneven"]
    even = Group(prompt=made.prompt(0), samples=(with_part(0, None), with_part(1, None)))
    assert "uneven_groups" not in reward_metrics(records_of([even]))["reward_parts"]["style"]
