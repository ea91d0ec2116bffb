"""Shaping of one completion's reward between the parts and the advantage. Plain numbers in and out; no torch.

Leaves out which completions there are, running moments (`stats.Moments`) and what is done about masks (`stages.shape`).
"""

from __future__ import annotations

LEAST_STD = 1e-8
"""Rewards are left alone while their running deviation is below this."""


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """0 for up to limit - buffer sampled tokens, falling in a straight line to -1 at `limit`, -1 beyond (DAPO eq. 13, arXiv:2503.14476).

    >>> [overlong_penalty(tokens, limit=100, buffer=20) for tokens in (80, 81, 90, 100, 120)]
    [0.0, -0.05, -0.5, -1.0, -1.0]
    """
    assert 0 < buffer <= limit, f"0 < buffer <= limit, got {buffer} and {limit}"
    return -min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer)) + 0.0  # no -0.0


def normalised(reward: float, mean: float, std: float, *, centre: bool) -> float:
    """reward / std, or (reward - mean) / std with `centre`; unchanged while std is below LEAST_STD.

    >>> normalised(1.0, 0.5, 0.5, centre=False), normalised(1.0, 0.5, 0.5, centre=True), normalised(1.0, 1.0, 0.0, centre=True)
    (2.0, 1.0, 1.0)
    """
    if std < LEAST_STD:
        return reward
    return (reward - mean) / std if centre else reward / std


def clipped(reward: float, low: float, high: float) -> float:
    """
    >>> clipped(12.0, -10.0, 10.0), clipped(-3.0, -10.0, 10.0)
    (10.0, -3.0)
    """
    return min(max(reward, low), high)


def truncated_reward(reward: float, factor: float) -> float:
    """A truncated answer's reward: above 0 times `factor`; at or below 0 as it is, because a factor would make a punishment smaller.

    >>> truncated_reward(0.8, 0.25), truncated_reward(-0.8, 0.25)
    (0.2, -0.8)
    """
    return reward * factor if reward > 0 else reward
