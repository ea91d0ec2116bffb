"""When each lesson is taught, in numbers, and that each is taught once."""

import json
import re

import pytest

from rftcli.observe.lessons import LESSONS, LessonState, lessons

# code -> (steps of metrics that teach it at the last one, steps that must not)
CASES = {
    "zero_signal": ([{"zero_signal_fraction": 0.81}] * 5, [{"zero_signal_fraction": 0.8}] * 9),
    "reward_always_zero": ([{"reward_mean": 0.0, "reward_std": 0.0}] * 5, [{"reward_mean": 0.1, "reward_std": 0.3}] + [{"reward_mean": 0.0}] * 9),
    "reward_constant": ([{"reward_mean": 1.0, "reward_std": 0.0}] * 5, [{"reward_mean": 1.0, "reward_std": 0.01}] * 9),
    "truncated": ([{"truncated_fraction": 0.51}], [{"truncated_fraction": 0.5}]),
    "entropy_collapse": ([{"entropy": 2.0}, {"entropy": 0.19}], [{"entropy": 2.0}, {"entropy": 0.2}]),
    "kl_large": ([{"kl": 1.01}], [{"kl": 1.0}, {"kl": "nan"}]),
    "no_gradient": (
        [{"grad_norm": 0.0, "reward_errors": 0, "samples_dropped": 0}],
        [{"grad_norm": 1e-12}, {}, {"grad_norm": 0.0, "reward_errors": 1}, {"grad_norm": 0.0, "samples_dropped": 1}],
    ),
    "reward_errors": ([{"reward_errors": e} for e in (1, 1, 2)], [{"reward_errors": e} for e in (0, 1, 2, 0, 2, 2, 2, 1)]),
    "nothing_scored": (
        [{"updates_skipped": 1, "reward_errors": 4, "samples_dropped": 4}],
        [{"reward_mean": 0.5, "reward_errors": 3}, {"reward_errors": 0}, {}],
    ),
    "ratio_off": ([{"ratio_mean": 1.011}], [{"ratio_mean": 0.991}, {"ratio_mean": 1.009}]),
    "sampler_gap": (
        [{"sampler_logprob_gap": {"mean": 0.02, "max": 0.5}}, {}, {"sampler_logprob_gap": {"mean": 0.081, "max": 1.5}}],
        [{"sampler_logprob_gap": {"mean": gap, "max": 3.0}} for gap in (0.03, 0.079, 1e-6, "nan")] + [{}],
    ),
    "mostly_clipped": ([{"clip_low_fraction": 0.3, "clip_high_fraction": 0.21}], [{"clip_low_fraction": 0.3, "clip_high_fraction": 0.2}]),
    "kl_coefficient_runs": (
        [{"kl_coefficient": 0.05}, {"kl_coefficient": 0.51}],
        [{"kl_coefficient": 0.05}, {"kl_coefficient": 0.5}, {"kl": 0.1}],
    ),
    "critic_lost": (
        [{"value_mean": -0.1, "return_mean": 0.45, "reward_std": 0.5}] * 10,
        [{"value_mean": 0.0, "return_mean": 0.5, "reward_std": 0.5}] * 20
        + [{"value_mean": 0.0, "return_mean": 0.5, "reward_std": 0.0, "reward_mean": 0.5}] * 20,
    ),
    "updates_skipped": (
        [{"updates_skipped": 1}],
        [{"updates_skipped": 0}, {"updates_skipped": 1, "reward_errors": 4}],  # nothing was scored: no gradient is to blame
    ),
    "refill_exhausted": ([{"dynamic": {"groups_without_signal": 1}}], [{"dynamic": {"groups_without_signal": 0}}, {}]),
}
KEYS = re.compile(r"`((?:models|data|rollout|rewards|reward_shaping|algorithm|batch|train)\b[a-z_.0-9]*)`")


def test_every_lesson_has_a_case():
    assert [lesson.code for lesson in LESSONS] == list(CASES)


@pytest.mark.parametrize("code", CASES)
def test_taught_at_the_first_step_that_shows_it_and_only_once(code):
    teaches, _ = CASES[code]
    state = LessonState(on_policy=True)
    taught = [dict(lessons(metrics, state)) for metrics in teaches * 3]
    assert [code in found for found in taught] == [step == len(teaches) - 1 for step in range(len(taught))]
    text = taught[len(teaches) - 1][code]
    assert KEYS.search(text), text
    assert "{" not in text


@pytest.mark.parametrize("code", CASES)
def test_not_taught_at_the_bound(code):
    state = LessonState(on_policy=True)
    for metrics in CASES[code][1]:
        assert code not in dict(lessons(metrics, state))


@pytest.mark.parametrize("code", [lesson.code for lesson in LESSONS if lesson.steps > 1])
def test_a_step_without_it_starts_the_count_anew(code):
    teaches, _ = CASES[code]
    state = LessonState(on_policy=True)
    interrupted = [*teaches[:-1], {"reward_mean": 0.5, "reward_std": 0.5}, *teaches[:-1]]
    assert all(code not in dict(lessons(metrics, state)) for metrics in interrupted)


def test_absent_metrics_teach_nothing():
    state = LessonState(on_policy=True)
    assert [lessons({}, state) for _ in range(10)] == [[]] * 10


def test_an_engine_that_drifts_is_told_before_it_stops_the_run():
    """In float32, where rounding is a millionth: five times the first gap, and no rounding that grows."""

    def codes(*gaps):
        state = LessonState(on_policy=True)
        return [code for gap in gaps for code, _ in lessons({"sampler_logprob_gap": {"mean": gap, "max": 4 * gap}}, state)]

    assert codes(4e-5, 1.9e-4) == [] and codes(4e-5, 2.1e-4) == ["sampler_gap"]
    assert codes(1e-6, 9e-5) == [] and codes(0.012, 0.05) == []
    state = LessonState(on_policy=True)
    lessons({"sampler_logprob_gap": {"mean": 0.01, "max": 0.2}}, state)
    (text,) = dict(lessons({"sampler_logprob_gap": {"mean": 0.0601, "max": 2.5}}, state)).values()
    assert "0.0601 nats apart on average (2.5 at most, 0.01 on average when first measured)" in text


def test_a_ratio_away_from_one_is_expected_off_policy():
    assert lessons({"ratio_mean": 1.3}, LessonState(on_policy=False)) == []


def test_rewards_without_spread_may_teach():
    """Where answers are compared with something else than their group; where rewards teach nothing at all, their being alike says nothing."""
    alike = [{"zero_signal_fraction": 1.0, "reward_mean": 1.0, "reward_std": 0.0}] * 6
    zero = [{"zero_signal_fraction": 1.0, "reward_mean": 0.0, "reward_std": 0.0}] * 6
    for given, state, expected in (
        (alike, LessonState(on_policy=True), {"zero_signal", "reward_constant"}),
        (zero, LessonState(on_policy=True), {"zero_signal", "reward_always_zero"}),
        (alike, LessonState(on_policy=True, compares=False), {"reward_constant"}),
        (zero, LessonState(on_policy=True, compares=False), {"reward_always_zero"}),
        (alike, LessonState(on_policy=True, compares=False, rewarded=False), set()),
        (zero, LessonState(on_policy=True, compares=False, rewarded=False), set()),
    ):
        assert {code for metrics in given for code, _ in lessons(metrics, state)} == expected


def test_zero_rewards_after_others_are_constant_but_not_always_zero():
    state = LessonState(on_policy=True)
    lessons({"reward_mean": 0.5, "reward_std": 0.5}, state)
    codes = [code for _ in range(5) for code, _ in lessons({"reward_mean": 0.0, "reward_std": 0.0}, state)]
    assert codes == ["reward_constant"]


def test_texts_carry_the_numbers():
    state = LessonState(on_policy=True)
    found = dict(lessons({"truncated_fraction": 0.734, "kl": 3.14159, "entropy": 2.0}, state))
    assert found["truncated"].startswith("73% of the answers")
    assert "3.14 nats" in found["kl_large"]
    found = dict(lessons({"entropy": 0.1}, state))
    assert "to 0.1 nats a token from 2 at the start" in found["entropy_collapse"]


def test_the_state_survives_a_resume():
    first = LessonState(on_policy=True)
    for metrics in [{"truncated_fraction": 0.9, "entropy": 2.0, "reward_mean": 0.0, "reward_std": 0.0, "reward_errors": 1}] * 4:
        lessons(metrics, first)
    resumed = LessonState(on_policy=True)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed == first
    found = dict(lessons({"truncated_fraction": 0.9, "entropy": 0.1, "reward_mean": 0.0, "reward_std": 0.0, "reward_errors": 2}, resumed))
    assert set(found) == {"entropy_collapse", "reward_always_zero", "reward_errors"}


def _parts(**parts):
    return {"reward_parts": parts}


def test_a_part_that_never_scores_nor_fails_is_named_once():
    silent, fine = {"errors": 0}, {"mean": 0.0, "std": 0.0, "errors": 0}
    state = LessonState(on_policy=True)
    found = [lessons(_parts(mine=silent, math=fine), state) for _ in range(2)]
    resumed = LessonState(on_policy=True)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    found += [lessons(_parts(mine=silent, late=silent, math=fine), resumed) for _ in range(4)]
    text = "part `{}` returned None for every completion so far: a forgotten return? Look at `rewards`."
    mine, late = ("part_abstained", text.format("mine")), ("part_abstained", text.format("late"))
    assert found == [[], [], [mine], [], [late], []]


def test_a_part_that_does_nothing_but_fail_is_named_once():
    failing, fine = {"errors": 4}, {"mean": 0.0, "std": 0.0, "errors": 4}
    state = LessonState(on_policy=True)
    found = [lessons(_parts(mine=failing, math=fine), state) for _ in range(2)]
    resumed = LessonState(on_policy=True)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    found += [lessons(_parts(mine=failing, math=fine), resumed) for _ in range(3)]
    assert [[code for code, _ in step] for step in found] == [[], [], ["part_failed"], [], []]
    assert "part `mine` failed on every completion" in found[2][0][1] and "(4 errors in this step)" in found[2][0][1]
    state = LessonState(on_policy=True)
    steps = [failing, failing, fine, failing, {"errors": 0}, failing]
    assert [lessons(_parts(mine=part), state) for part in steps] == [[]] * 6


@pytest.mark.parametrize("once", [{"mean": 1.0, "std": 0.0, "errors": 0}, {"errors": 2}])
def test_a_part_that_scored_or_failed_before_may_abstain(once):
    state = LessonState(on_policy=True)
    assert [lessons(_parts(mine=part), state) for part in [{"errors": 0}, once, *[{"errors": 0}] * 5]] == [[]] * 7
