"""Stops and saves by the clock: in time, with the measured cost of one more step and its checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rftcli.errors import UsageError
from rftcli.plan.plan import CheckpointPlan
from rftcli.runtime.deadline import Boundary, TimeLimits, announced

PLAN = CheckpointPlan(
    every=0, every_minutes=None, before_deadline=True, deadline_margin_seconds=60.0, keep=3, keep_best=None, max_gib=None,
    trainer_state=True, save_hf=True,
)  # fmt: skip
GO_ON = Boundary(save=False, stop=None)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, plan: CheckpointPlan = PLAN, max_hours: float | None = None, **times: float) -> TimeLimits:
    return TimeLimits(plan, max_hours, clock=clock, **times)


def steps(made: TimeLimits, clock: Clock, seconds: float, save_seconds: float | None = None) -> tuple[int, Boundary]:
    """Steps of so many seconds until something is due."""
    for number in range(1, 1000):
        clock.now += seconds
        due = made.step_over(None)
        if due != GO_ON:
            return number, due
        if save_seconds is not None:
            clock.now += save_seconds
            made.saved(save_seconds)
    raise AssertionError("nothing was ever due")


def test_the_run_stops_before_the_deadline_with_room_for_a_step_a_checkpoint_and_the_margin() -> None:
    clock = Clock()
    made = limits(clock, deadline=1000.0 + 200.0)
    # after 8 steps of 10 s: 1080 + 10 (one more step) + 10 (its checkpoint, as long as a step while none is measured) + 60 (margin) < 1200
    assert steps(made, clock, 10.0) == (12, Boundary(save=True, stop="deadline"))
    clock = Clock()
    made = limits(clock, deadline=1000.0 + 200.0)
    # 10 s steps and 20 s checkpoints: 1000 + 30k + 10 (this step) + 10 + 20 + 60 >= 1200 from k = 4 on
    assert steps(made, clock, 10.0, save_seconds=20.0) == (5, Boundary(save=True, stop="deadline"))


def test_a_deadline_counts_only_where_it_is_asked_for() -> None:
    clock = Clock()
    made = limits(clock, replace(PLAN, before_deadline=False), deadline=1001.0)
    clock.now += 100.0
    assert made.step_over(None) == GO_ON


def test_hours_are_those_of_the_attempt_and_are_not_exceeded() -> None:
    clock = Clock()
    made = limits(clock, max_hours=1.0, started=900.0)  # 100 s went into the start: the end is at 4500
    number, due = steps(made, clock, 300.0, save_seconds=10.0)
    assert due == Boundary(save=True, stop="max_hours")
    assert clock.now + 300.0 + 10.0 >= 4500.0 > clock.now  # one more step might have gone over it; this one has not
    assert number == 11


def test_at_least_one_step_is_done() -> None:
    clock = Clock()
    made = limits(clock, max_hours=0.001)
    assert steps(made, clock, 100.0) == (1, Boundary(save=True, stop="max_hours"))


def test_a_signal_comes_first() -> None:
    clock = Clock()
    made = limits(clock, deadline=0.0)
    assert made.step_over("interrupt") == Boundary(save=True, stop="interrupt")


def test_minutes_are_counted_from_the_last_checkpoint() -> None:
    clock = Clock()
    made = limits(clock, replace(PLAN, every_minutes=2.0))
    assert steps(made, clock, 50.0) == (3, Boundary(save=True, stop=None))
    made.saved(5.0)
    assert steps(made, clock, 50.0) == (3, Boundary(save=True, stop=None))


def test_one_slow_step_is_forgotten() -> None:
    clock = Clock()
    made = limits(clock, deadline=17_000.0)
    clock.now += 5000.0
    assert made.step_over(None) == GO_ON
    number, _ = steps(made, clock, 100.0)
    assert clock.now > 16_000.0 and number > 90  # with the slow one in mind it would have stopped at the next


def test_where_a_deadline_is_announced() -> None:
    assert announced({}) is None
    assert announced({"SLURM_JOB_END_TIME": "1700000000"}) == 1_700_000_000.0
    assert announced({"SLURM_JOB_END_TIME": "1700000000", "RFT_DEADLINE": "1600000000.5"}) == 1_600_000_000.5
    for text in ("tomorrow", "nan", "inf"):
        with pytest.raises(UsageError, match="RFT_DEADLINE"):
            announced({"RFT_DEADLINE": text})


def test_a_checkpoint_behind_a_step_is_expected_to_be_as_long_again_and_makes_no_step_shorter() -> None:
    clock = Clock()
    made = limits(clock, deadline=1000.0 + 200.0)
    made.step_over(None)
    made.copied()
    clock.now += 30.0
    made.saved(30.0, behind=True)  # committed in the middle of a step of 40 s
    clock.now += 10.0
    # 1040 + 40 (one more step, timed whole) + 30 (its checkpoint) + 60 (margin) < 1200
    assert made.step_over(None) == GO_ON
    clock.now += 40.0
    assert made.step_over(None) == Boundary(save=True, stop="deadline")  # 1080 + 40 + 30 + 60


def test_minutes_between_checkpoints_are_counted_from_the_copy() -> None:
    clock = Clock()
    made = limits(clock, replace(PLAN, every_minutes=1.0, before_deadline=False))
    clock.now += 60.0
    assert made.step_over(None).save
    made.copied()
    clock.now += 50.0
    made.saved(50.0, behind=True)
    assert made.step_over(None) == GO_ON
    clock.now += 10.0
    assert made.step_over(None).save
