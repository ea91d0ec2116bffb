"""When too many samples could not be scored."""

import json
from typing import Any

import pytest

from rftcli.errors import RftError
from rftcli.rewards.failures import ABSTAINED, FEWEST_SAMPLES, ErrorWindow, count_failures
from rftcli.types import Completion, FinishReason, PartScore, Prompt, ScoredSample, TokenTrace


def sample(reward: float | None, *parts: tuple[str, str | None, float]) -> ScoredSample:
    prompt = Prompt(draw=0, row=0, row_id="r", source="s", label="l", text="p", token_ids=(1,))
    completion = Completion(
        prompt=prompt, sample=0, text="", text_with_special="", trace=TokenTrace(ids=()), finish=FinishReason.STOP, policy_version=0
    )
    scores = tuple(PartScore(name=name, value=None, weight=weight, seconds=0.0, error=error) for name, error, weight in parts)
    return ScoredSample(completion=completion, parts=scores, reward=reward)


def test_each_sample_without_a_reward_counts_once() -> None:
    samples = [
        sample(1.0, ("a", None, 1.0)),
        sample(0.0, ("a", "ignored, the sample has a reward", 1.0)),
        sample(None, ("a", "first", 1.0), ("b", "second", 1.0)),
        sample(None, ("log", "weight 0", 0.0), ("b", "second", 1.0)),
        sample(None, ("a", "first", 1.0)),
        sample(None, ("a", None, 1.0)),
        sample(None, ("log", "weight 0", 0.0), ("a", None, 1.0)),
    ]
    assert count_failures(iter(samples)) == (7, {"a: first": 2, "b: second": 1, ABSTAINED: 2})


def test_it_stops_above_the_rate_and_not_at_it() -> None:
    ErrorWindow(0.05).add(100, {"e": 5})
    with pytest.raises(RftError, match=r"6 of the last 100 samples could not be scored.*max_error_rate 0\.05"):
        ErrorWindow(0.05).add(100, {"e": 6})


def test_the_first_samples_of_a_run_are_judged_as_if_there_were_more() -> None:
    window = ErrorWindow(0.05)
    window.add(8, {"e": 1})
    assert FEWEST_SAMPLES == 32
    with pytest.raises(RftError, match="2 of the last 16"):
        window.add(8, {"e": 1})
    with pytest.raises(RftError, match="8 of the last 8"):
        ErrorWindow(0.05).add(8, {"e": 8})


def test_rates_0_and_1() -> None:
    ErrorWindow(0.0).add(8, {})
    with pytest.raises(RftError):
        ErrorWindow(0.0).add(1000, {"e": 1})
    ErrorWindow(1.0).add(1000, {"e": 1000})


def test_old_steps_leave_the_window() -> None:
    window = ErrorWindow(0.05, window=200)
    window.add(100, {"e": 5})
    for _ in range(5):
        window.add(100, {"e": 5})  # always 10 of 200
    window.add(100, {})
    window.add(100, {})
    window.add(100, {"e": 10})
    with pytest.raises(RftError, match="11 of the last 200"):
        window.add(100, {"e": 1})


def test_one_step_may_be_larger_than_the_window() -> None:
    window = ErrorWindow(0.05, window=10)
    window.add(1000, {"e": 50})
    window.add(1000, {"e": 50})
    with pytest.raises(RftError, match="51 of the last 1000"):
        window.add(1000, {"e": 51})


def test_the_text_names_the_distinct_errors_with_counts() -> None:
    errors = {f"part: error {index}": index for index in range(1, 8)}
    with pytest.raises(RftError) as caught:
        ErrorWindow(0.05).add(40, errors)
    text = str(caught.value)
    assert text.splitlines()[0] == "28 of the last 40 samples could not be scored, more than reward_shaping.max_error_rate 0.05 allows"
    assert text.splitlines()[1] == "  7 x part: error 7" and "  3 x part: error 3" in text and "error 2" not in text
    assert "  and 2 other errors" in text and "hint: " in text


def test_it_remembers_through_json() -> None:
    window = ErrorWindow(0.05)
    window.add(8, {"e": 1})
    state: dict[str, Any] = json.loads(json.dumps(window.state_dict()))
    restored = ErrorWindow(0.05)
    restored.load_state_dict(state)
    with pytest.raises(RftError, match="2 of the last 16"):
        restored.add(8, {"e": 1})


def test_all_ranks_stop_with_the_same_text() -> None:
    counts = [(8, {"a: x": 3}), (8, {})]  # gathered from two ranks, in rank order, on both
    texts = []
    for _ in range(2):
        window = ErrorWindow(0.05)
        total = sum(number for number, _ in counts)
        merged = {text: number for _, failures in counts for text, number in failures.items()}
        with pytest.raises(RftError) as caught:
            window.add(total, merged)
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and "3 of the last 16" in texts[0]
