"""KL estimators and controllers."""

import math

import pytest
import torch

from rftcli.algo.kl import CONTROLLERS, KLS, LOG_RATIO_BOUND, absolute, adaptive_coefficient, fixed_coefficient, k1, k2, k3


def values_and_gradients(function, differences: list[float]) -> tuple[list[float], list[float]]:
    logprobs = torch.tensor(differences, dtype=torch.float64).sub(1.0).requires_grad_()
    value = function(logprobs, torch.full((len(differences),), -1.0, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    return value.tolist(), gradient.tolist()


@pytest.mark.parametrize(
    ("function", "values", "gradients"),
    [
        (k1, [0.5, -0.5], [1.0, 1.0]),
        (k2, [0.125, 0.125], [0.5, -0.5]),
        (k3, [0.106531, 0.148721], [0.393469, -0.648721]),
        (absolute, [0.5, 0.5], [1.0, -1.0]),
    ],
)
def test_values_and_gradients(function, values: list[float], gradients: list[float]) -> None:
    actual_values, actual_gradients = values_and_gradients(function, [0.5, -0.5])
    assert actual_values == pytest.approx(values, abs=5e-7)
    assert actual_gradients == pytest.approx(gradients, abs=5e-7)


def test_halved_and_doubled_probability() -> None:
    """The sign: a descent step moves towards the reference in both cases."""
    d = math.log(0.5) - math.log(0.25)
    assert values_and_gradients(k1, [d, -d])[0] == pytest.approx([0.693147, -0.693147], abs=5e-7)
    assert values_and_gradients(k2, [d, -d])[0] == pytest.approx([0.240227, 0.240227], abs=5e-7)
    values, gradients = values_and_gradients(k3, [d, -d])
    assert values == pytest.approx([0.193147, 0.306853], abs=5e-7)
    assert gradients == pytest.approx([0.5, -1.0])
    assert 0.2 + 0.1 * values[0] == pytest.approx(0.219315, abs=5e-7)


def test_k3_is_never_negative_and_keeps_small_differences() -> None:
    d = torch.logspace(-8, 1, 20_001)
    d = torch.cat([-d, d])
    value = k3(d, torch.zeros_like(d))
    assert (value >= 0).all()
    assert k3(torch.tensor([1e-3]), torch.zeros(1)).item() == pytest.approx(1e-6 / 2 - 1e-9 / 6, rel=1e-3)


@pytest.mark.parametrize("name", sorted(KLS))
def test_equal_policies_have_no_divergence(name: str) -> None:
    logprobs = torch.tensor([-0.1, -3.0])
    assert KLS[name].function(logprobs, logprobs).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(KLS))
def test_far_apart_stays_finite(name: str) -> None:
    far, bound = torch.tensor([-1e4, 0.0, -math.inf]), torch.tensor([-LOG_RATIO_BOUND, LOG_RATIO_BOUND, -LOG_RATIO_BOUND])
    reference = torch.tensor([0.0, -1e4, 0.0])
    assert torch.equal(KLS[name].function(far, reference), KLS[name].function(bound, torch.zeros(3)))


@pytest.mark.parametrize("name", sorted(KLS))
def test_average_pull_under_the_policy(name: str) -> None:
    """`pulls` says whether the expected gradient of the term, tokens drawn from the policy, is anything but zero; for k2 it is that of the KL."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    (pull,) = torch.autograd.grad((logprobs.detach().exp() * KLS[name].function(logprobs, reference)).sum(), logits, retain_graph=True)
    assert bool(pull.abs().max() > 1e-3) == KLS[name].pulls
    exact = {"k2": (logprobs.exp() * (logprobs - reference)).sum(), "k3": (reference.exp() * (reference - logprobs)).sum()}
    if name in exact:
        assert torch.allclose(pull, torch.autograd.grad(exact[name], logits)[0], atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_values(name: str) -> None:
    policy, reference = torch.tensor([0.2, 0.1, 0.7]).double(), torch.tensor([0.5, 0.3, 0.2]).double()
    exact = (policy * (policy.log() - reference.log())).sum().item()
    assert (policy * KLS[name].function(policy.log(), reference.log())).sum().item() == pytest.approx(exact)


@pytest.mark.parametrize("name", sorted(KLS))
def test_only_k1_is_unbiased_in_the_reward(name: str) -> None:
    """In the reward a term enters as value x score function; unbiased if that is the gradient of KL(policy || reference)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    probabilities, term = logprobs.detach().exp(), KLS[name].function(logprobs.detach(), reference)
    (in_reward,) = torch.autograd.grad((probabilities * term * logprobs).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    assert torch.allclose(in_reward, exact, atol=1e-9) == KLS[name].unbiased_in_reward


def test_adaptive_controller_step_after_step() -> None:
    coefficient, seen = 0.2, []
    for kl in (12.0, 3.0, 6.6):
        coefficient = adaptive_coefficient(coefficient, kl, target=6.0, horizon=10000, completions=256)
        seen.append(coefficient)
    assert seen == pytest.approx([0.201024, 0.199995, 0.200507], abs=5e-7)


def test_controllers_at_rest() -> None:
    assert adaptive_coefficient(0.2, 6.0, target=6.0, horizon=10000, completions=256) == 0.2
    assert adaptive_coefficient(0.2, math.nan, target=6.0, horizon=10000, completions=256) == 0.2
    assert adaptive_coefficient(0.2, math.inf, target=6.0, horizon=10000, completions=256) == pytest.approx(0.201024)
    assert fixed_coefficient(0.2, 12.0) == 0.2
    assert sorted(CONTROLLERS) == ["adaptive", "fixed"]
