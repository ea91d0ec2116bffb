"""Statistics of a step: over all completions of all ranks at once, failures never numbers, whatever order the records come in."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.algo import groups as estimator_groups
from rftcli.stages import records
from rftcli.stages.records import (
    SampleRecord,
    length_metrics,
    part_metrics,
    record,
    records_of,
    reward_metrics,
    sample_line,
    spread,
    uneven_groups,
)
from rftcli.types import FinishReason, PartScore


def test_rewards_with_the_sample_deviation(made: SimpleNamespace) -> None:
    """The deviation of 1, 0, 0, 0 has the divisor n - 1: 0.5, the same as the advantage estimators use."""
    found = reward_metrics(records_of(made.groups({0: [1.0, 0.0, 0.0, 0.0]})))
    assert (found["reward_mean"], found["reward_std"]) == (0.25, 0.5)
    assert found["reward_parts"] == {"p": {"mean": 0.25, "std": 0.5, "errors": 0}}
    assert found["labels"] == {"default": 0.25}
    assert (found["reward_errors"], found["samples_dropped"], found["zero_signal_fraction"]) == (0, 0, 0.0)


def test_a_completion_without_a_reward_is_no_zero(made: SimpleNamespace) -> None:
    found = reward_metrics(records_of(made.groups({0: [1.0, None, 0.0, None], 1: [0.7, None, None, None], 2: [None] * 4})))
    assert found["reward_mean"] == pytest.approx(1.7 / 3)
    assert (found["samples_dropped"], found["reward_errors"]) == (9, 9)
    assert found["zero_signal_fraction"] == pytest.approx(2 / 3)  # one scored sibling has nothing to be compared with
    assert found["reward_parts"]["p"]["errors"] == 9


def test_nothing_scored_at_all(made: SimpleNamespace) -> None:
    found = reward_metrics(records_of(made.groups({0: [None, None]})))
    assert not {"reward_mean", "reward_std"} & set(found)  # absent, not 0
    assert found["labels"] == {} and found["reward_parts"] == {"p": {"errors": 2}} and found["zero_signal_fraction"] == 1.0


@pytest.mark.parametrize(
    ("rewards", "fraction"),
    [
        ({0: [1.0, 1.0], 1: [0.0, 1.0]}, 0.5),
        ({0: [1.0], 1: [0.0, 0.0]}, 1.0),
        ({0: [1.0, None], 1: [0.0, None]}, 1.0),
        ({0: [0.1 + 0.2, 0.3]}, 1.0),  # rounding is no signal
        ({0: [1e6 + 0.5, 1e6]}, 1.0),  # below a millionth of its size
        ({0: [1e6 + 2, 1e6]}, 0.0),
        ({0: [1e-6, 0.0]}, 0.0),
        ({0: [9e-7, 0.0]}, 1.0),
        ({0: [-1.0, 1.0], 1: [1.0, 1.0], 2: [0.0, 0.0], 3: [0.0, 2.0]}, 0.5),
    ],
)
def test_groups_without_signal(made: SimpleNamespace, rewards: dict[int, list[float]], fraction: float) -> None:
    assert reward_metrics(records_of(made.groups(rewards)))["zero_signal_fraction"] == fraction


def test_one_completion_a_prompt_is_no_group(made: SimpleNamespace) -> None:
    """Then there is no share of groups without signal: 100% would read like a fault."""
    assert "zero_signal_fraction" not in reward_metrics(records_of(made.groups({0: [1.0], 1: [0.0]})))
    assert "zero_signal_fraction" not in reward_metrics([])


def test_the_rule_for_no_signal_is_the_estimators() -> None:
    assert records.FLAT_SPREAD == estimator_groups.FLAT_SPREAD


@settings(deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 30),
        st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.1, 0.1 + 1e-9, -3.5, 1e6, 1e6 + 0.1])), min_size=1, max_size=5),
        min_size=1,
        max_size=8,
    )
)
def test_the_fraction_agrees_with_the_advantages(made: SimpleNamespace, rewards: dict[int, list[float | None]]) -> None:
    pairs = [(reward, draw) for draw, values in rewards.items() for reward in values if reward is not None]
    values, draws = torch.tensor([reward for reward, _ in pairs], dtype=torch.float64), torch.tensor([draw for _, draw in pairs], dtype=torch.int64)
    expected = estimator_groups.zero_signal_fraction(values, draws, len(rewards))
    found = reward_metrics(records_of(made.groups(rewards))).get("zero_signal_fraction")
    assert found == (pytest.approx(expected) if any(len(values) > 1 for values in rewards.values()) else None)


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.integers())
def test_the_order_of_records_changes_no_bit(made: SimpleNamespace, values: list[float], seed: int) -> None:
    """Ranks hand their records over in another order when there are more of them."""
    straight = records_of(made.groups({draw: values[draw::3] for draw in range(3)}))
    mixed = random.Random(seed).sample(straight, len(straight))
    assert reward_metrics(mixed) == reward_metrics(straight) and length_metrics(mixed) == length_metrics(straight)


def test_parts(made: SimpleNamespace) -> None:
    """A part that abstained counts neither as a value nor as an error; one that failed counts as an error."""

    def parts(right: float | None, short: float | None, error: str | None = None) -> list[PartScore]:
        return [
            PartScore(name="short", value=short, weight=0.1, seconds=0.0, error=error),
            PartScore(name="right", value=right, weight=0.9, seconds=0.0),
        ]

    samples = [
        made.sample(0, 0, 0.9, parts=parts(1.0, None)), made.sample(0, 1, 0.0, parts=parts(0.0, None, "broke")),
        made.sample(0, 2, 0.95, parts=parts(1.0, 0.5)), made.sample(0, 3, 0.1, parts=parts(None, 1.0)),
    ]  # fmt: skip
    found = part_metrics([record(sample) for sample in samples])
    assert list(found) == ["right", "short"]
    assert found["right"] == {"mean": pytest.approx(2 / 3), "std": pytest.approx((1 / 3) ** 0.5), "errors": 0, "uneven_groups": 1}
    assert found["short"] == {"mean": 0.75, "std": pytest.approx(0.125**0.5), "errors": 1, "uneven_groups": 1}
    assert reward_metrics([record(sample) for sample in samples])["reward_errors"] == 1


def test_labels_have_means_of_their_own(made: SimpleNamespace) -> None:
    rows = [(0, 0, 1.0, "math"), (0, 1, 0.0, "math"), (1, 0, 3.0, "code"), (1, 1, None, "code")]
    samples = [made.sample(draw, index, reward, label=label) for draw, index, reward, label in rows]
    assert reward_metrics([record(sample) for sample in samples])["labels"] == {"code": 3.0, "math": 0.5}


def test_lengths(made: SimpleNamespace) -> None:
    samples = [
        made.sample(0, 0, ids=(1,) * 3, prompt_ids=(1,) * 5), made.sample(0, 1, ids=(1,) * 8, finish=FinishReason.LENGTH, prompt_ids=(1,) * 5),
        made.sample(1, 0, ids=(1,) * 5, prompt_ids=(1,) * 7), made.sample(1, 1, ids=(), finish=FinishReason.ABORT, prompt_ids=(1,) * 7),
    ]  # fmt: skip
    assert length_metrics([record(sample) for sample in samples]) == {
        "response_tokens": {"mean": 4.0, "min": 0, "max": 8, "terminated_mean": 4.0, "terminated_min": 3, "terminated_max": 5},
        "prompt_tokens_mean": 6.0,
        "truncated_fraction": 0.25,
        "tokens": 16 + 24,
    }
    cut = length_metrics([record(made.sample(finish=FinishReason.LENGTH))])
    assert "terminated_mean" not in cut["response_tokens"] and cut["truncated_fraction"] == 1.0


def test_spread() -> None:
    assert spread([]) == spread([5.0]) == 0.0
    assert spread([1.0, 3.0]) == pytest.approx(2**0.5)


def test_a_record_is_small_and_complete(made: SimpleNamespace) -> None:
    sample = made.sample(7, 3, 0.5, label="math", ids=(4, 5, 6), prompt_ids=(1, 2), finish=FinishReason.LENGTH)
    assert record(sample) == SampleRecord(
        draw=7, sample=3, label="math", reward=0.5, parts=sample.parts, tokens=3, prompt_tokens=2, finish=FinishReason.LENGTH
    )


def test_a_line_of_the_samples_file(made: SimpleNamespace) -> None:
    sample = made.sample(7, 3, None, label="math")
    line = json.loads(json.dumps(sample_line(sample, step=4, advantage=None)))
    assert line == {
        "draw": 7, "sample": 3, "prompt_id": "n:7", "label": "math", "step": 4, "prompt": "7?", "completion": "a3<e>", "reference": "7",
        "parts": {"p": {"value": None, "weight": 1.0, "error": "broke"}}, "reward": None, "advantage": None, "tokens": 2, "finish": "stop",
        "policy_version": 0, "media": [], "special_end": "<e>",
    }  # fmt: skip
    scored = sample_line(made.sample(0, 0, 1.0), step=1, advantage=0.5)
    assert scored["parts"] == {"p": {"value": 1.0, "weight": 1.0}} and scored["advantage"] == 0.5


def test_sizes_of_groups_are_those_of_their_baselines(made: SimpleNamespace) -> None:
    found = reward_metrics(records_of(made.groups({0: [1.0, 0.0, 0.5], 1: [1.0, None, None]})))
    assert found["groups"] == 2 and found["group_size"] == {"mean": 2.0, "min": 1, "max": 3}


def test_a_name_that_a_function_leaves_out_for_some_answers_is_uneven(made: SimpleNamespace) -> None:
    def parts(*names: str, error: str | None = None) -> list[PartScore]:
        return [PartScore(name=name, value=None if error else 1.0, weight=1.0, seconds=0.0, error=error) for name in names]

    samples = [
        made.sample(0, 0, 2.0, parts=parts("p.a", "p.b")),
        made.sample(0, 1, 1.0, parts=parts("p.a")),
        made.sample(1, 0, 1.0, parts=parts("p.a")),
    ]
    failed = made.sample(1, 1, None, parts=parts("p", error="broke"))
    assert uneven_groups([record(sample) for sample in [*samples, failed]]) == {"p.b": 1}
