"""Every preset and estimator learns the quickstart's task, as in `python -m benchmarks.learning`, whose numbers stand in docs/algorithms."""

from __future__ import annotations

import pytest

from benchmarks.learning import CASES, run


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_learns(name: str) -> None:
    """Held-out accuracy rises by far more than its interval, and the mean reward with it. A minute or two on two free cores."""
    result = run(name, seed=0)
    assert len(result["rewards"]) == 24
    assert result["reward_last"] > result["reward_first"] + 0.1, result  # grpo_passk asks for one right answer in k, and gains less in the mean
    assert result["held_out_after"]["low"] > result["held_out_before"]["high"], result
