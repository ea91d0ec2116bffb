"""Where the seconds of a step went: nothing is lost, nothing counted twice, with a clock of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.runtime.clock import STAGES, Stopwatch


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lap_in_numbers() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.add("rollout", 2.0)
    clock.now += 2.5
    with watch.time("learn"):
        clock.now += 4.0
    with watch.time("learn"):
        clock.now += 1.0
    assert watch.lap() == {
        "rollout": 2.0, "score": 0.0, "credit": 0.0, "learn": 5.0, "sync": 0.0, "eval": 0.0, "checkpoint": 0.0, "other": 0.5, "total": 7.5,
    }  # fmt: skip
    clock.now += 3.0
    after = watch.lap()
    assert after["other"] == after["total"] == 3.0 and all(after[stage] == 0.0 for stage in STAGES)


def test_time_of_a_stage_that_fails_counts() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with pytest.raises(ValueError, match="broke"), watch.time("score"):
        clock.now += 2.0
        raise ValueError("broke")
    assert watch.lap()["score"] == 2.0


def test_more_than_the_time_that_passed_is_no_negative_rest() -> None:
    """A stage that overlaps another (scores that came during the rollout) may claim a second twice."""
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 1.0
    watch.add("rollout", 1.0)
    watch.add("score", 0.5)
    lap = watch.lap()
    assert lap["other"] == 0.0 and lap["total"] == 1.0


def test_an_unknown_stage_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        Stopwatch(Clock()).add("rolout", 1.0)


@given(st.lists(st.tuples(st.sampled_from([*STAGES, "between", "lap"]), st.integers(0, 1000)), max_size=30))
def test_every_second_is_in_one_place(moves: list[tuple[str, int]]) -> None:
    """Whole seconds are exact: over all laps, the stages and the rest add up to the time that passed."""
    clock = Clock()
    watch = Stopwatch(clock)
    laps = []
    for stage, seconds in moves:
        if stage == "lap":
            laps.append(watch.lap())
        elif stage == "between":
            clock.now += seconds
        else:
            with watch.time(stage):
                clock.now += seconds
    laps.append(watch.lap())
    for lap in laps:
        assert sum(value for name, value in lap.items() if name != "total") == lap["total"]
    assert sum(lap["total"] for lap in laps) == clock.now - 100.0
    for name in STAGES:
        assert sum(lap[name] for lap in laps) == sum(seconds for stage, seconds in moves if stage == name)


def test_the_clock_of_a_run_moves_forward() -> None:
    watch = Stopwatch()
    assert watch.lap()["total"] >= 0.0 and list(watch.lap()) == [*STAGES, "other", "total"]


def test_the_most_memory_of_every_stage() -> None:
    """Read at a stage's end; several turns of a stage count with the largest; the next step starts afresh."""
    readings = iter([3.0, 1.0, 2.0, 1.5, 5.0])
    watch = Stopwatch(lambda: 0.0, lambda: next(readings))
    watch.add("rollout", 1.0)
    with watch.time("learn"):
        pass
    with watch.time("learn"):
        pass
    with watch.time("learn"):
        pass
    assert watch.peaks() == {"rollout": 3.0, "learn": 2.0}
    watch.add("rollout", 1.0)
    assert watch.peaks() == {"rollout": 5.0}
    assert Stopwatch(lambda: 0.0).peaks() == {}
