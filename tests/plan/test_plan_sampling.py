"""Which completions are asked for and trained on, in the plan: what each key becomes, what the plan says of it, and what a smoke run makes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rftcli.plan.compile_problems import CompileError
from rftcli.plan.plan import Plan
from rftcli.plan.plan_sampling import DynamicPlan, LabelSampling, OverSamplePlan, PartialPlan, one_temperature, temperatures
from rftcli.plan.show import plan_text
from rftcli.runtime.smoke import smoke_plan

Compiled = Callable[..., Plan]


def test_everything_is_off(compiled: Compiled) -> None:
    plan = compiled()
    rollout = plan.rollout
    assert (rollout.dynamic, rollout.keep, rollout.replay, rollout.over_sample, rollout.partial, plan.data.curriculum) == (None,) * 6
    assert rollout.by_label == {} and one_temperature(rollout) and temperatures(rollout, "any") == (1.0, 1.0)
    assert not any(name in plan_text(plan) for name in ("refill", "replay", "curriculum", "first token", "over-sampling"))


def test_what_is_on_is_said(compiled: Compiled) -> None:
    text = plan_text(compiled(
        "rollout={dynamic: {range: [0.1, 0.9]}, keep: {best: 2, worst: 1}, replay: {}, first_token_temperature: 4.0}", "data.curriculum={}",
        "rollout.by_label.default={temperature: 0.5, top_p: 0.9}",
    ))  # fmt: skip
    for line in (
        "groups without a spread of reward and a mean from 0.1 to 0.9, at most 3 extra rollouts a step", "2 best and 1 worst of 8 completions",
        "after 10 steps, at most 25% of a step", "a pass rate from 0.1 to 0.9, and 10% of the others", "temperature 4",
        "1024 new tokens, temperature 0.5, top_p 0.9", "a step draws between 64 and 256 prompts and trains on 64 groups",
        "rollout.by_label.default: completions come from another distribution",
    ):  # fmt: skip
        assert line in text, line
    assert "1.5 x the prompts, whole groups counted every 256 tokens" in plan_text(compiled("rollout.over_sample.factor=1.5"))
    assert "my.order:Mine" in plan_text(compiled("data.curriculum={kind: python, python: 'my.order:Mine'}"))


@pytest.mark.parametrize(
    ("sets", "notes"),
    [
        (("rollout={dynamic: {}, replay: {}}",), []),
        (("rollout={dynamic: {}, replay: {}}", "algorithm.advantage.kind=remax"), ["replaced, though with `remax`", "asked again, though"]),
        (("rollout.dynamic={}", "models.teacher.server=http://t"), ["replaced, though with the teacher they teach as well"]),
        (("algorithm.advantage.kind=remax",), []),
    ],
)
def test_a_refill_of_groups_that_teach_is_said(compiled: Compiled, sets: tuple[str, ...], notes: list[str]) -> None:
    """Estimators that do not compare within a group, and a teacher, learn from groups without spread as well."""
    found = [note for note in compiled(*sets).notes if "whose rewards are alike" in note]
    assert len(found) == len(notes) and all(part in note for part, note in zip(notes, found, strict=True))


def test_a_label_says_only_what_differs(compiled: Compiled) -> None:
    label = "{max_new_tokens: 9, top_k: 0, stop: []}"
    plan = compiled(f"rollout={{temperature: 0.8, top_k: 5, stop: [a], max_new_tokens: 99, by_label: {{default: {label}}}}}")
    assert plan.rollout.by_label["default"] == LabelSampling(
        temperature=0.8, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=9, min_new_tokens=0, stop=(), stop_token_ids=()
    )
    assert one_temperature(plan.rollout) and not plan.probes(1)  # the rollout's own top-k still filters the other labels


def test_temperatures_of_tokens(compiled: Compiled) -> None:
    rollout = compiled("rollout={temperature: 0.9, first_token_temperature: 3.0, by_label: {default: {temperature: 0.5}}}").rollout
    assert not one_temperature(rollout)
    assert temperatures(rollout, "default") == (3.0, 0.5) and temperatures(rollout, "other") == (3.0, 0.9)


def test_temperatures_alone_keep_the_comparison_with_the_engine(compiled: Compiled) -> None:
    """They hold on both sides; a label's filter does not."""
    assert compiled("rollout={first_token_temperature: 3.0, by_label: {default: {temperature: 0.5}}}").probes(1)
    assert not compiled("rollout.by_label.default.top_p=0.9").probes(1)


def test_plans_hold_them(compiled: Compiled) -> None:
    assert compiled("rollout.dynamic={range: [0.0, 0.5], metric: exact}").rollout.dynamic == DynamicPlan(
        max_extra_rollouts=3, low=0.0, high=0.5, metric="exact"
    )
    assert compiled("rollout.over_sample={}").rollout.over_sample == OverSamplePlan(factor=1.25, slice_tokens=256)


def test_partial_rollouts(compiled: Compiled) -> None:
    asked = ("rollout={partial: {budget_tokens: 64}, max_version_lag: 2}", "algorithm.loss.old=sampler")
    plan = compiled(*asked)
    assert plan.rollout.partial == PartialPlan(budget_tokens=64, max_version_lag=2) and plan.probes(2)
    assert "answers grow by 64 tokens a step; the unfinished go on in the next step, tokens at most 2 updates old" in plan_text(plan)
    assert any("rollout.partial: tokens may be up to 2 updates old" in note for note in plan.notes)
    both = compiled(*asked, "rollout.over_sample={factor: 1.5, slice_tokens: 32}")
    (note,) = [note for note in both.notes if "rollout.over_sample" in note]
    assert note.startswith("rollout.over_sample: 1.5 times the prompts are in work;") and "dropped" not in note


def test_a_label_longer_than_the_model(compiled: Compiled) -> None:
    """Where the longest of all is worked out by the plan."""
    compiled("rollout={max_new_tokens: auto, by_label: {default: {max_new_tokens: 1024}}}", max_positions=2048)
    with pytest.raises(CompileError) as caught:
        compiled("rollout={max_new_tokens: auto, by_label: {default: {max_new_tokens: 1025}}}", max_positions=2048)
    assert [problem.path for problem in caught.value.problems] == ["rollout.by_label.default.max_new_tokens"]


def test_a_smoke_run_shortens_labels_too(compiled: Compiled) -> None:
    short = smoke_plan(compiled("rollout.by_label.default={max_new_tokens: 100, min_new_tokens: 50}"), 2).rollout
    assert (short.max_new_tokens, short.by_label["default"].max_new_tokens, short.by_label["default"].min_new_tokens) == (16, 16, 16)
