"""Folding events: curves, evaluations, attempts, times, and the text at the end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.events import CheckpointSaved, EvalDone, Progress, RunEnded, RunStarted, StepDone, Warned, last_attempts
from rftcli.observe.history import History, summary
from rftcli.observe.series import KEPT_ENDS, Series


def test_series_replaces_inserts_and_drops():
    series = Series()
    for step, value in [(1, 1.0), (3, 3.0), (2, 2.0), (3, 30.0)]:
        series.put(step, value)
    assert list(series.steps) == [1, 2, 3]
    assert list(series.values) == [1.0, 2.0, 30.0]
    series.drop(2)
    series.drop(99)
    assert list(series.values) == [1.0, 30.0]
    assert series.last == 30.0
    series.put(4, math.nan)
    assert series.mean_of_last(3) == 15.5
    assert Series().last is None
    assert Series().mean_of_first(3) is None


@given(st.integers(1, 3000), st.integers(4 * KEPT_ENDS, 300))
def test_series_in_bounded_memory_keeps_its_ends_and_its_shape(count, limit):
    series = Series(limit)
    for step in range(count):
        series.put(step, float(step))
    assert len(series) <= limit
    ends = min(KEPT_ENDS, count)
    assert list(series.values[:ends]) == [float(i) for i in range(ends)]
    assert list(series.values[-ends:]) == [float(i) for i in range(count - ends, count)]
    assert list(series.steps) == sorted(set(series.steps))
    gap = max((abs(s - v) for s, v in zip(series.steps, series.values, strict=True)), default=0.0)
    assert gap <= count / 8  # a straight line stays near itself


def _eval(step, attempt, value, time=0.0):
    return EvalDone(
        time=time,
        attempt=attempt,
        step=step,
        seconds=1.0,
        sets={"gsm8k": {"mean@1": {"value": value, "low": value - 0.1, "high": value + 0.1}, "prompts": 64}},
    )


def crash_and_resume(step_done):
    """Evaluated every 2 steps; attempt 1 dies after step 12, attempt 2 goes on from the checkpoint of step 8 to step 10 and dies, attempt 3 to 14."""
    events = []
    for attempt, first, last in [(1, 1, 12), (2, 9, 10), (3, 9, 14)]:
        events.append(RunStarted(time=1000.0 * attempt + 10.0 * (first - 1), attempt=attempt, step=first - 1, info={"steps": 14, "name": "x"}))
        for step in range(first, last + 1):
            extra = {"only_in_first": 1.0} if attempt == 1 else {}
            events.append(
                step_done(step, attempt, reward_mean=100.0 * attempt + step, seconds={"rollout": 6.0, "learn": 3.0, "total": 10.0}, **extra)
            )
            if step % 2 == 0:
                events.append(_eval(step, attempt, 0.01 * step + attempt, time=events[-1].time))
    return events


def test_the_last_attempt_of_a_step_wins_and_nothing_else_is_lost(step_done):
    events = crash_and_resume(step_done)
    history = History()
    for event in events:
        history.see(event)
    kept = last_attempts(events)
    steps = {e.step: e.metrics["reward_mean"] for e in kept if isinstance(e, StepDone)}
    curve = history.series["reward_mean"]
    assert dict(zip(curve.steps, curve.values, strict=True)) == steps
    assert steps == {**{s: 100.0 + s for s in range(1, 9)}, **{s: 300.0 + s for s in range(9, 15)}}
    assert {s: e["gsm8k"]["mean@1"]["value"] for s, e in history.evals.items()} == {
        e.step: e.sets["gsm8k"]["mean@1"]["value"] for e in kept if e.kind == "eval"
    }
    assert list(history.series["only_in_first"].steps) == list(range(1, 9))  # redone steps no longer have it
    assert list(history.series["eval.gsm8k.mean@1"].values) == pytest.approx([1.02, 1.04, 1.06, 1.08, 3.10, 3.12, 3.14])


def test_a_step_that_only_an_earlier_attempt_reached_stays(step_done):
    history = History()
    for event in [step_done(s, 1, kl=1.0) for s in range(1, 13)] + [step_done(s, 2, kl=2.0) for s in (9, 10)]:
        history.see(event)
    assert list(history.series["kl"].values) == [1.0] * 8 + [2.0] * 2 + [1.0] * 2
    assert history.step == 10


def test_times_are_summed_over_attempts_and_the_pace_is_this_attempts(step_done):
    history = History()
    for event in crash_and_resume(step_done):
        history.see(event)
    assert history.seconds == 120.0 + 20.0 + 60.0
    assert history.stage_seconds["rollout"] == 6.0 * (12 + 2 + 6)
    assert history.seconds_per_step == 10.0
    assert history.total_steps == 14
    assert history.eta_seconds is None


def test_pace_and_eta_before_the_second_step(step_done):
    history = History()
    assert history.seconds_per_step is None
    assert history.eta_seconds is None
    history.see(RunStarted(time=0.0, attempt=1, step=0, info={"steps": 11}))
    history.see(step_done(1, seconds={"total": 7.0}))
    assert history.eta_seconds == 70.0


def test_stage_warnings_counts_and_the_end():
    history = History()
    history.see(Progress(time=0.0, attempt=1, step=1, stage="rollout", done=1, of=4))
    assert history.stage.stage == "rollout"
    for step in range(100):
        history.see(Warned(time=1.0, attempt=1, step=step, code="zero_signal" if step else "truncated", text="t"))
    history.see(CheckpointSaved(time=2.0, attempt=1, step=5, path="checkpoints/step_000005", seconds=1.0))
    assert history.stage is None
    assert history.warning_counts == {"zero_signal": 99, "truncated": 1}
    assert len(history.warnings) == 50
    assert history.counts == {"progress": 1, "warning": 100, "checkpoint": 1}
    assert history.checkpoints == {5: "checkpoints/step_000005"}
    history.see(RunEnded(time=3.0, attempt=1, step=5, status="failed", cause="boom"))
    assert history.ended.cause == "boom"
    history.see(RunStarted(time=10.0, attempt=2, step=5, info={}))
    assert history.ended is None


def test_bounded_history_keeps_the_first_evaluation_and_the_newest(step_done):
    history = History(limit=4 * KEPT_ENDS)
    for step in range(1000):
        history.see(step_done(step, kl=1.0, parts={"a": {"mean": 2.0}}))
        history.see(_eval(step, 1, 0.001 * step))
        history.see(CheckpointSaved(time=0.0, attempt=1, step=step, path=str(step), seconds=0.0))
    assert len(history.evals) == len(history.checkpoints) == 4 * KEPT_ENDS
    assert min(history.evals) == 0
    assert max(history.evals) == 999
    assert all(len(series) <= 4 * KEPT_ENDS for series in history.series.values())
    assert history.held_out() == {"gsm8k": "mean@1"}
    assert history.held_out_curve("gsm8k", "mean@1")[-1] == pytest.approx((999, 0.999, 0.899, 1.099))


def test_summary_of_a_finished_run(tmp_path, step_done):
    run_dir = tmp_path / "my run"
    for name in ("samples", "checkpoints", "final", "attempts/1/logs"):
        (run_dir / name).mkdir(parents=True)
        (run_dir / name / "file").touch()
    for name in ("evals", "tensorboard"):
        (run_dir / name).mkdir()  # empty: not worth a line
    history = History()
    history.see(RunStarted(time=1000.0, attempt=1, step=0, info={"steps": 40}))
    history.see(_eval(0, 1, 0.25, time=1000.0))
    for step in range(1, 41):
        history.see(step_done(step, reward_mean=step / 40, tokens_total=1000 * step, seconds={"rollout": 6.0, "learn": 3.0, "total": 10.0}))
    history.see(_eval(40, 1, 0.5, time=1400.0))
    history.see(Warned(time=1400.0, attempt=1, step=40, code="truncated", text="t"))
    history.see(RunEnded(time=1405.0, attempt=1, step=40, status="done"))
    assert summary(history, run_dir).split("\n") == [
        "done: 40 of 40 steps in 6m45s",
        "  reward       0.138 -> 0.887  (mean of the first and the last 10 of 40 steps)",
        "  eval gsm8k   mean@1 0.250 [0.150,0.350] -> 0.500 [0.400,0.600]  (step 0 -> 40)",
        "  warnings     truncated x1",
        "  time         rollout 60%, learn 30%",
        "  tokens       40,000",
        f"  samples      {run_dir}/samples",
        f"  checkpoints  {run_dir}/checkpoints",
        f"  final        {run_dir}/final",
        f"  logs         {run_dir}/attempts/1/logs",
        "next:",
        f"  rft eval '{run_dir}'",
    ]


def test_a_summary_on_a_narrow_terminal_breaks_between_words_and_leaves_paths_and_commands_whole(tmp_path, step_done):
    run_dir = tmp_path / ("long" * 10)
    (run_dir / "samples").mkdir(parents=True)
    (run_dir / "samples" / "file").touch()
    history = History()
    history.see(RunStarted(time=0.0, attempt=1, step=0, info={"steps": 4}))
    for step in range(1, 5):
        history.see(step_done(step, reward_mean=0.5, seconds={"rollout": 6.0, "learn": 3.0, "total": 10.0}))
    history.see(CheckpointSaved(time=4.0, attempt=1, step=4, path="checkpoints/step_000004", seconds=1.0))
    lines = summary(history, run_dir, 40).split("\n")
    assert lines[1:] == [
        "  reward   0.500 -> 0.500  (mean of the",
        "           first and the last 2 of 4",
        "           steps)",
        "  time     rollout 60%, learn 30%",
        f"  samples  {run_dir}/samples",
        "next:",
        f"  rft samples {run_dir}",
    ]


def test_summary_of_an_evaluation(tmp_path):
    for name in ("samples", "evals", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "evals" / "step_000010.json").touch()
    history = History()
    history.see(RunStarted(time=1000.0, attempt=1, step=10, info={"name": "q"}))
    history.see(_eval(10, 1, 0.5, time=1001.5))
    assert summary(history, tmp_path).startswith("unfinished after 1.5s")
    history.see(RunEnded(time=1002.0, attempt=1, step=10, status="done"))
    assert summary(history, tmp_path).split("\n") == [
        "evaluated step 10 in 2.0s",
        "  eval gsm8k  mean@1 0.500 [0.400,0.600]  (step 10)",
        f"  evals       {tmp_path}/evals",
    ]


def test_a_training_run_that_fails_after_its_first_evaluation_is_no_evaluation(tmp_path):
    history = History()
    history.see(_eval(0, 1, 0.5, time=0.0))
    history.see(RunEnded(time=2.0, attempt=1, step=0, status="failed", cause="boom"))
    assert summary(history, tmp_path).startswith("failed while it was starting\n")


def test_summary_of_a_run_that_failed_leaves_why_and_how_to_go_on_to_the_command(tmp_path):
    history = History()
    history.see(RunStarted(time=0.0, attempt=3, step=0, info={"steps": 40}))
    history.see(RunEnded(time=5.0, attempt=3, step=0, status="failed", cause="out of \x1b[31mmemory\nhint: fewer rows"))
    headline = "failed: 0 of 40 steps in 5.0s, attempt 3"
    assert summary(history, tmp_path) == headline  # nothing was committed: nothing to look at
    history.see(CheckpointSaved(time=4.0, attempt=3, step=0, path="checkpoints/step_000000", seconds=1.0))
    assert summary(history, tmp_path).split("\n") == [headline, "next:", f"  rft samples {tmp_path}"]  # no set to evaluate on is known
    history.see(_eval(0, 3, 0.5, time=4.0))
    assert summary(history, tmp_path).split("\n")[-2:] == ["next:", f"  rft eval {tmp_path}"]
    assert summary(History(), tmp_path) == "unfinished while it was starting"


def test_summary_of_a_run_that_ended_early_says_why(tmp_path):
    """Nothing went wrong, so there is no error that would say it."""
    history = History()
    history.see(RunStarted(time=0.0, attempt=1, step=0, info={"steps": 1}))
    history.see(RunEnded(time=5.0, attempt=1, step=1, status="done", cause="stopped early: \x1b[31m100 tokens\nmore"))
    assert summary(history, tmp_path) == "done: 0 of 1 step in 5.0s\n  stopped early: 100 tokens"


@pytest.mark.parametrize(("steps", "count"), [(2, 1), (7, 3), (50, 10)])
def test_summary_never_compares_a_step_with_itself_in_two_means(tmp_path, step_done, steps, count):
    history = History()
    for step in range(1, steps + 1):
        history.see(step_done(step, reward_mean=float(step)))
    first, last = (1 + count) / 2, steps - (count - 1) / 2
    line = next(line for line in summary(history, tmp_path).split("\n") if "reward" in line)
    before, after = line.split()[1], line.split()[3]
    assert (float(before), float(after)) == pytest.approx((first, last))
    assert f"last{f' {count}' if count > 1 else ''} of {steps} steps" in line


def test_a_run_of_one_step_has_no_first_and_last(tmp_path, step_done):
    history = History()
    history.see(step_done(1, reward_mean=0.5))
    (line,) = [line for line in summary(history, tmp_path).split("\n") if "reward" in line]
    assert line == "  reward  0.500  (one step)"
