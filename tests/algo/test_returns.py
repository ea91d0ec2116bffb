"""Credit per token against numbers worked out by hand, and against a loop that a person can check."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.algo.returns import gae, returns_to_go, token_rewards, value_loss, white_completions, white_tokens


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


ONE = torch.zeros(3, dtype=torch.int64)


def test_gae_in_numbers() -> None:
    """Rewards 0, 0, 1, values .5, .6, .7, gamma 1, lambda .95."""
    assert gae(vector(0, 0, 1), vector(0.5, 0.6, 0.7), ONE, gamma=1.0, lam=0.95).tolist() == pytest.approx([0.46575, 0.385, 0.3])


def test_the_terminal_reward_is_at_the_last_trained_token() -> None:
    """Response t0, t1, end, padding with mask 1, 1, 1, 0: score 1 at the end token, discounted by 0.9."""
    rewards = token_rewards(vector(1.0), ONE)
    assert rewards.tolist() == [0.0, 0.0, 1.0]
    values = vector(0.1, 0.2, 0.3)
    advantages = gae(rewards, values, ONE, gamma=0.9, lam=0.95)
    assert advantages.tolist() == pytest.approx([0.6515675, 0.6685, 0.7])
    assert (advantages + values).tolist() == pytest.approx([0.7515675, 0.8685, 1.0])


def test_token_returns_of_reinforce_in_numbers() -> None:
    """k1 .1, -.2, .3 with the coefficient 0.1 and the reward 1."""
    rewards = token_rewards(vector(1.0), ONE, 0.1 * vector(0.1, -0.2, 0.3))
    assert returns_to_go(rewards, ONE).tolist() == pytest.approx([0.98, 0.99, 0.97])
    assert returns_to_go(token_rewards(vector(1.0), ONE), ONE, gamma=0.5).tolist() == pytest.approx([0.25, 0.5, 1.0])


def test_value_loss_in_numbers() -> None:
    assert value_loss(vector(1.0), vector(0.5), vector(1.2), clip=0.2).tolist() == pytest.approx([0.125])
    assert value_loss(vector(1.0), vector(0.5), vector(1.2), clip=None).tolist() == pytest.approx([0.02])
    held = torch.tensor([1.0], requires_grad=True)
    value_loss(held, torch.tensor([0.5]), torch.tensor([1.2]), clip=0.2).sum().backward()
    assert held.grad is not None and held.grad.tolist() == [0.0]  # it has moved as far as it may
    free = torch.tensor([0.6], requires_grad=True)
    value_loss(free, torch.tensor([0.5]), torch.tensor([1.2]), clip=0.2).sum().backward()
    assert free.grad is not None and free.grad.tolist() == pytest.approx([-0.6])


def test_no_token_at_all() -> None:
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert gae(nothing, nothing, none).numel() == returns_to_go(nothing, none).numel() == token_rewards(torch.zeros(0), none).numel() == 0
    assert white_completions(nothing).numel() == 0 and white_completions(torch.tensor([3.0])).tolist() == [0.0]


def test_whitening_in_numbers() -> None:
    """rloo of [1,0,0,0], [1,1,1,1] over all completions; lengths 10,1,1,1 over all tokens."""
    third = -1 / 3
    assert white_completions(vector(1.0, third, third, third, 0, 0, 0, 0)).tolist() == pytest.approx(
        [2.290763, *[-0.763588] * 3, *[0.0] * 4], abs=1e-6
    )
    tokens = vector(*[0.75] * 10, *[-0.25] * 3)
    mean = float(tokens.mean())
    found = white_tokens(tokens, mean=mean, variance=float((tokens - mean).square().mean()))
    assert found.tolist() == pytest.approx([0.5477] * 10 + [-1.8257] * 3, abs=1e-4)
    assert white_tokens(vector(0.1, 0.1), mean=0.1, variance=0.0).tolist() == [0.0, 0.0]


NUMBERS = st.floats(-3, 3, width=32)
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, gamma=st.floats(0, 1), lam=st.floats(0, 1), data=st.data())
def test_all_sequences_at_once_are_as_one_by_one(lengths: list[int], gamma: float, lam: float, data: st.DataObject) -> None:
    count = sum(lengths)
    rewards = torch.tensor(data.draw(st.lists(NUMBERS, min_size=count, max_size=count)), dtype=torch.float64)
    values = torch.tensor(data.draw(st.lists(NUMBERS, min_size=count, max_size=count)), dtype=torch.float64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    expected = []
    for index in range(len(lengths)):
        r, v = rewards[sequence == index].tolist(), values[sequence == index].tolist()
        found, running = [0.0] * len(r), 0.0
        for t in reversed(range(len(r))):
            delta = r[t] + gamma * (v[t + 1] if t + 1 < len(r) else 0.0) - v[t]
            found[t] = running = delta + gamma * lam * running
        expected += found
    assert gae(rewards, values, sequence, gamma=gamma, lam=lam).tolist() == pytest.approx(expected, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), gamma=st.floats(0, 1), data=st.data())
def test_lambda_1_is_the_return_minus_the_value_and_targets_are_returns(lengths: list[int], gamma: float, data: st.DataObject) -> None:
    count = sum(lengths)
    scores = torch.tensor(data.draw(st.lists(NUMBERS, min_size=len(lengths), max_size=len(lengths))), dtype=torch.float64)
    values = torch.tensor(data.draw(st.lists(NUMBERS, min_size=count, max_size=count)), dtype=torch.float64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards = token_rewards(scores, sequence)
    assert float(rewards.sum()) == pytest.approx(float(scores.sum()), abs=1e-9)
    targets = gae(rewards, values, sequence, gamma=gamma, lam=1.0) + values
    assert targets.tolist() == pytest.approx(returns_to_go(rewards, sequence, gamma=gamma).tolist(), abs=1e-5)
