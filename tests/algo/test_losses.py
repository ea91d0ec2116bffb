"""Policy losses: numbers, gradients, and which tokens count as clipped."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.kl import LOG_RATIO_BOUND
from rftcli.algo.losses import LossTerms, ppo_clip


def ppo(differences: list[float], advantages: list[float], *, dual_clip: float | None = None) -> tuple[LossTerms, list[float]]:
    """Terms and d sum / d new, with both clip ranges 0.2."""
    new = torch.tensor(differences, dtype=torch.float64).sub(1.5).requires_grad_()
    old = torch.full((len(differences),), -1.5, dtype=torch.float64)
    terms = ppo_clip(new, old, torch.tensor(advantages, dtype=torch.float64), clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), new)
    return terms, gradient.tolist()


def test_numbers() -> None:
    terms, gradient = ppo([0, 0.5, -0.5, 0.5, -0.5, 2], [1, 1, 1, -1, -1, -1])
    assert terms.loss.tolist() == pytest.approx([-1, -1.2, -0.606531, 1.648721, 0.8, 7.389056], abs=5e-7)
    assert gradient == pytest.approx([-1, 0, -0.606531, 1.648721, 0, 7.389056], abs=5e-7)


@pytest.mark.parametrize(("bound", "loss"), [(3.0, 3.0), (4.0, 4.0), (8.0, 7.389056)])
def test_dual_clip(bound: float, loss: float) -> None:
    terms, gradient = ppo([2, 2, 0.5], [-1, 1, -1], dual_clip=bound)
    assert terms.loss.tolist() == pytest.approx([loss, -1.2, 1.648721], abs=5e-7)
    assert gradient == pytest.approx([loss if loss > bound else 0 if loss == bound else 7.389056, 0, 1.648721], abs=5e-7)
    assert terms.clipped_low.tolist() == [False] * 3 and terms.clipped_high.tolist() == [False, True, False]


def test_clip_fractions_look_at_the_sign_of_the_advantage() -> None:
    ratios = [1.3, 1.3, 1.3, 0.7, 1.0]
    terms, _ = ppo([math.log(ratio) for ratio in ratios], [1, 1, -1, -1, 1])
    assert terms.clipped_high.tolist() == [True, True, False, False, False]
    assert terms.clipped_low.tolist() == [False, False, False, True, False]
    assert terms.loss.tolist() == pytest.approx([-1.2, -1.2, 1.3, 0.8, -1.0])
    assert terms.loss.mean().item() == pytest.approx(-0.26)
    assert terms.ratio.tolist() == pytest.approx(ratios)


def test_on_policy_the_ratio_is_exactly_one() -> None:
    new = torch.tensor([-0.1, -1e-8, -17.3, -1000.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.0])
    terms = ppo_clip(new, new.detach(), advantages, clip_low=0.0, clip_high=0.0, dual_clip=3.0)
    assert terms.ratio.tolist() == [1.0] * 4 and not terms.ratio.requires_grad
    assert not terms.clipped_low.any() and not terms.clipped_high.any()
    terms.loss.sum().backward()
    assert new.grad.tolist() == (-advantages).tolist()


def test_far_off_policy_stays_finite() -> None:
    new = torch.tensor([0.0, -1e4, -math.inf], requires_grad=True)
    old = torch.tensor([-1e4, 0.0, -1.0])
    terms = ppo_clip(new, old, torch.tensor([-1.0, -1.0, 1.0]), clip_low=1.0, clip_high=0.2)
    assert terms.ratio.tolist() == pytest.approx([math.exp(LOG_RATIO_BOUND), math.exp(-LOG_RATIO_BOUND), math.exp(-LOG_RATIO_BOUND)])
    terms.loss.sum().backward()
    assert new.grad.tolist() == [0.0, 0.0, 0.0]


def test_nothing_flows_into_old_and_advantages() -> None:
    new, old, advantages = (torch.tensor([-1.0, -2.0], requires_grad=True) for _ in range(3))
    ppo_clip(new, old, advantages, clip_low=0.2, clip_high=0.2).loss.sum().backward()
    assert new.grad is not None and old.grad is None and advantages.grad is None


def test_a_fault_stays_with_its_token() -> None:
    new = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    terms = ppo_clip(new, torch.tensor([-1.0, -1.0, -1.0]), torch.ones(3), clip_low=0.2, clip_high=0.2)
    counts = torch.tensor([True, False, True])
    terms.loss[counts].sum().backward()
    assert torch.isfinite(terms.loss[counts]).all() and torch.isfinite(new.grad[counts]).all()


def test_no_trained_token() -> None:
    new = torch.zeros(0, requires_grad=True)
    terms = ppo_clip(new, torch.zeros(0), torch.zeros(0), clip_low=0.2, clip_high=0.2)
    terms.loss.sum().backward()
    assert terms.loss.shape == new.grad.shape == (0,)


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=20),
    st.floats(0, 1),
    st.floats(0, 3),
    st.none() | st.floats(1.01, 10),
)
def test_selection_equals_the_formula(tokens: list, low: float, high: float, dual: float | None) -> None:
    difference, advantage = torch.tensor(tokens, dtype=torch.float64).T
    rho = difference.exp()
    expected = torch.maximum(-advantage * rho, -advantage * rho.clamp(1 - low, 1 + high))
    if dual is not None:
        expected = torch.where(advantage < 0, torch.minimum(expected, -dual * advantage), expected)
    terms = ppo_clip(difference, torch.zeros_like(difference), advantage, clip_low=low, clip_high=high, dual_clip=dual)
    assert torch.allclose(terms.loss, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"clip_low": -0.1, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": -0.1}, {"clip_low": 1.1, "clip_high": 0.2}])
def test_impossible_bounds(options: dict) -> None:
    with pytest.raises(AssertionError):
        ppo_clip(torch.zeros(1), torch.zeros(1), torch.zeros(1), **options)
    with pytest.raises(AssertionError):
        ppo_clip(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_low=0.2, clip_high=0.2, dual_clip=1.0)
