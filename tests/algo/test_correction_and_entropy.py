"""Weights for the difference between sampler and trainer, the entropy bonus, and the KL term in the loss: numbers, properties, finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.algo import correction
from rftcli.algo.cov_losses import covariances, how_many
from rftcli.algo.entropy import count_kept, largest, next_coefficient
from rftcli.algo.kl import KLS, loss_term
from rftcli.algo.logprobs import chunked_logprobs, plain_logprobs

ONE = torch.zeros(3, dtype=torch.int64)


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_weights_in_numbers() -> None:
    ratio = of(0.3, 1.0, 3.0)
    assert correction.truncated(ratio, 2.0).tolist() == [0.3, 1.0, 2.0]
    assert correction.masked(ratio, (0.5, 2.0)).tolist() == [0.0, 1.0, 0.0]
    assert correction.masked(of(0.5, 2.0, 0.4999, 2.0001), (0.5, 2.0)).tolist() == [0.5, 2.0, 0.0, 0.0]  # the bounds belong to the band


def test_levels_in_numbers() -> None:
    """512 tokens of mean difference -0.001."""
    gap, sequence = torch.full((512,), -0.001, dtype=torch.float64), torch.zeros(512, dtype=torch.int64)
    for level, expected in (("token", 0.999), ("sequence", 0.5993), ("geometric", 0.9990)):
        assert correction.ratios(gap, sequence, 1, level=level).tolist() == pytest.approx([expected] * 512, abs=5e-5)


def test_the_same_sampler_needs_no_correction() -> None:
    gap, missing = correction.gaps(of(-1.0, -2.0), of(-1.0, -2.0))
    assert gap.tolist() == [0.0, 0.0] and not missing.any()
    for level in ("token", "sequence", "geometric"):
        assert correction.ratios(gap, ONE[:2], 1, level=level).tolist() == [1.0, 1.0]
    for by in ("k2", "k3", "max"):
        assert not correction.rejected(gap, ONE[:2], 1, by=by, bound=1e-12).any()
    assert not correction.rejected(gap, ONE[:2], 1, by="k1", band=(0.999, 1.001)).any()


def test_what_the_sampler_did_not_report_has_the_ratio_1() -> None:
    gap, missing = correction.gaps(of(-1.0, -1.0, -1.0), of(math.nan, -math.inf, -1.5))
    assert gap.tolist() == [0.0, 0.0, 0.5] and missing.tolist() == [True, True, False]
    assert correction.ratios(gap, ONE, 1, level="token").tolist() == pytest.approx([1.0, 1.0, math.exp(0.5)])
    assert correction.ratios(gap, ONE, 1, level="sequence").tolist() == pytest.approx([math.exp(0.5)] * 3)


def test_huge_gaps_are_held() -> None:
    for level in ("token", "sequence", "geometric"):
        found = correction.ratios(of(400.0, 400.0, -400.0), torch.tensor([0, 0, 1]), 2, level=level)
        assert found.tolist() == pytest.approx([math.exp(20)] * 2 + [math.exp(-20)])


def test_rejection_in_numbers() -> None:
    """Gaps (.1, -.3) and (.2, .2): means -.1 and .2; half squares .025 and .02; k3 .005171, .040818 and .021403."""
    gap, sequence = of(0.1, -0.3, 0.2, 0.2), torch.tensor([0, 0, 1, 1])

    def out(by: str, **limit: object) -> list[bool]:
        return correction.rejected(gap, sequence, 3, by=by, **limit).tolist()  # type: ignore[arg-type]

    assert out("k1", band=(math.exp(-0.11), math.exp(0.21))) == [False, False, False]
    assert out("k1", band=(math.exp(-0.09), math.exp(0.21))) == [True, False, False]
    assert out("k1", band=(math.exp(-0.11), math.exp(0.19))) == [False, True, False]
    assert out("k1", band=(1.1, 1.3)) == [True, False, False]  # a sequence without trained tokens stays
    assert out("k2", bound=0.0249) == [True, False, False] and out("k2", bound=0.0251) == [False] * 3
    assert out("k3", bound=0.0213) == [True, True, False]  # means .022994 and .021403
    assert out("k3", bound=0.022) == [True, False, False]
    assert out("max", bound=0.0408) == [True, False, False] and out("max", bound=0.0409) == [False] * 3


def test_gates_in_numbers() -> None:
    """p .5 under the trainer, q .4 under the sampler: tv .1; kl .4 log .8 + .6 log 1.2 = .020136."""
    old, gap = of(math.log(0.5)), of(math.log(0.5 / 0.4))
    ratio = gap.exp()
    for gate, distance in (("tv", 0.1), ("kl", 0.020136)):
        assert correction.gated(ratio, old, gap, gate=gate, bound=distance + 1e-6).tolist() == pytest.approx([1.25])
        assert correction.gated(ratio, old, gap, gate=gate, bound=distance - 1e-6).tolist() == [0.0]
    certain = correction.gated(of(1.0), of(0.0), of(0.0), gate="kl", bound=1e-6)
    assert certain.tolist() == [1.0]  # probability 1 on both sides


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8), st.floats(-2, 2))
def test_a_shift_of_both_log_probs_changes_no_ratio(values: list[float], shift: float) -> None:
    old, samp = torch.tensor(values, dtype=torch.float64), torch.tensor(values[::-1], dtype=torch.float64)
    one, _ = correction.gaps(old, samp)
    other, _ = correction.gaps(old + shift, samp + shift)
    assert torch.allclose(one, other, atol=1e-12)
    product = correction.ratios(one, torch.zeros(len(values), dtype=torch.int64), 1, level="sequence")
    geometric = correction.ratios(one, torch.zeros(len(values), dtype=torch.int64), 1, level="geometric")
    assert torch.allclose(geometric ** len(values), product, rtol=1e-9)


def test_covariances_in_numbers() -> None:
    a, old = of(2, -1, -1), of(-0.1, -2, -3)
    found = covariances(a, old, mean_advantage=float(a.mean()), mean_old=float(old.mean()))
    assert found.tolist() == pytest.approx([3.2, 0.3, 1.3])
    assert [how_many(2e-4, n) for n in (1, 4999, 5000, 9999, 10_000, 15_000)] == [1, 1, 1, 1, 2, 3]
    assert how_many(2e-3, 1000) == 2


# the entropy bonus


def test_the_entropy_controller_in_numbers() -> None:
    """Up by 0.005 at or below the target of 0.2, down above it, within [0, 0.01]."""
    knobs = {"target": 0.2, "delta": 0.005, "low": 0.0, "high": 0.01}
    coefficient, seen = 0.005, []
    for entropy in (0.2, 0.1, 0.3, 0.3, 0.3, 0.1, math.nan):
        coefficient = next_coefficient(coefficient, entropy, **knobs)
        seen.append(coefficient)
    assert seen == pytest.approx([0.01, 0.01, 0.005, 0.0, 0.0, 0.005, 0.005])


def test_entropy_with_a_gradient() -> None:
    """H = log sum exp - sum p x; dH/dx_i = -p_i (log p_i + H). The gradient of the log-prob is as without."""
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.3, 0.3, 0.3], [200.0, 0.0, -math.inf]], dtype=torch.float32, requires_grad=True)
    targets = torch.tensor([0, 1, 0])
    logprobs, entropy = plain_logprobs(logits, targets, 0.5, entropy_gradient=True)
    plain, flat = plain_logprobs(logits, targets, 0.5)
    assert torch.equal(logprobs, plain) and torch.allclose(entropy, flat, atol=1e-6) and not flat.requires_grad
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    p = torch.softmax(logits.detach().double() / 0.5, -1)
    log_p = torch.where(p > 0, p.log(), 0.0)
    expected = -p * (log_p - (p * log_p).sum(-1, keepdim=True)) / 0.5
    assert torch.allclose(gradient.double(), expected, atol=1e-6) and torch.isfinite(gradient).all()


def test_entropy_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, generator=generator)
    for row, column in ((0, 0), (1, 3), (3, 6)):
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(plain_logprobs(leaf, torch.zeros(4, dtype=torch.int64), 0.7, entropy_gradient=True)[1].sum(), leaf)
        values = []
        for sign in (1, -1):
            moved = logits.double().clone()
            moved[row, column] += sign * 1e-4
            p = torch.softmax(moved / 0.7, -1)
            values.append(float(torch.special.entr(p).sum()))
        assert float(gradient[row, column]) == pytest.approx((values[0] - values[1]) / 2e-4, abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_no_entropy_gradient(chunk: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(11, 5, generator=generator, requires_grad=True)
    hidden = torch.randn(7, 5, generator=generator)
    targets = torch.arange(7)

    def gradient(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(found[0].sum() + 0.3 * found[1].sum(), weight)[0]

    chunked = chunked_logprobs(hidden, targets, lambda part: part @ weight.T, temperature=0.9, chunk=chunk, entropy_gradient=True)
    expected = gradient(plain_logprobs(hidden @ weight.T, targets, 0.9, entropy_gradient=True))
    assert torch.allclose(gradient(chunked), expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=40), st.integers(1, 45), st.integers(1, 3))
def test_the_largest_of_all_ranks(values: list[float], count: int, ranks: int) -> None:
    """Ranks hold every `ranks`th value; the sum over ranks of a histogram is played by adding them up."""
    parts = [torch.tensor(values[rank::ranks], dtype=torch.float32) for rank in range(ranks)]
    threshold = sorted(values, reverse=True)[min(count, len(values)) - 1]

    def total_for(rank: int, known: list[list[float]]):  # type: ignore[no-untyped-def]
        """The totals of the first rounds are known; each further round is found by asking all ranks for their own part of it."""
        asked: list[list[float]] = []

        def total(part: list[float]) -> list[float]:
            asked.append(list(part))
            return known[len(asked) - 1] if len(asked) <= len(known) else part

        return total, asked

    known: list[list[float]] = []
    for _ in range(4):
        rounds = []
        for rank in range(ranks):
            total, asked = total_for(rank, known)
            largest(parts[rank], count, total)
            rounds.append(asked[len(known)])
        known.append([sum(column) for column in zip(*rounds, strict=True)])
    for rank in range(ranks):
        total, _ = total_for(rank, known)
        kept = largest(parts[rank], count, total)
        assert kept.tolist() == [value >= threshold for value in parts[rank].tolist()]


def test_the_share_of_tokens_that_is_kept() -> None:
    values = torch.tensor([0.1, 0.5, 0.3, 0.5, 0.0])
    for share, kept in ((0.2, [1, 3]), (0.4, [1, 3]), (0.6, [1, 2, 3]), (1.0, [0, 1, 2, 3, 4])):  # what ties with the last stays too
        found = largest(values, count_kept(share, 5), lambda part: part)
        assert found.nonzero().flatten().tolist() == kept
    assert largest(torch.zeros(0), 3, lambda part: part).shape == (0,)


# the KL term in the loss


@pytest.mark.parametrize("d", [0.5, -0.5])
@pytest.mark.parametrize("kind", sorted(KLS))
def test_values_and_gradients_of_the_kl_term(kind: str, d: float) -> None:
    """`unbiased_gradient`: the own value, the gradient d. `ratio_weighted` off policy, rho = exp(.3): rho k, with rho (k + k')."""
    own = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.expm1(-d) + d, 1 - math.exp(-d)), "abs": (abs(d), math.copysign(1, d))}[kind]
    rho = math.exp(0.3)
    for options, value, gradient in (
        ({}, own[0], own[1]),
        ({"unbiased_gradient": True}, own[0], d),
        ({"ratio_weighted": True}, rho * own[0], rho * (own[0] + own[1])),
    ):
        new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        term = loss_term(kind, new, of(-1.0 - d), of(-1.3), **options)
        (found,) = torch.autograd.grad(term.sum(), new)
        assert term.item() == pytest.approx(value) and found.item() == pytest.approx(gradient)
    weighted = {"k3": rho * d, "k1": rho * (1 + d)}
    if kind in weighted:
        assert rho * (own[0] + own[1]) == pytest.approx(weighted[kind])


def test_the_numbers_of_the_estimators() -> None:
    for d, values in ((0.5, (0.5, 0.125, 0.106531)), (-0.5, (-0.5, 0.125, 0.148721))):
        assert [KLS[kind].function(of(-1.0), of(-1.0 - d)).item() for kind in ("k1", "k2", "k3")] == pytest.approx(values, abs=5e-7)


@pytest.mark.parametrize("options", [{"unbiased_gradient": True}, {"ratio_weighted": True}])
def test_k1_pulls_towards_the_reference_with_an_option(options: dict[str, bool]) -> None:
    """Over two words, on policy: the mean gradient of the term is that of KL(policy || reference); without an option it is 0."""
    scores = torch.tensor([0.7, -0.4], dtype=torch.float64)
    reference = torch.log_softmax(of(-0.2, 0.3), -1)

    def gradient(**given: bool) -> torch.Tensor:
        leaf = scores.clone().requires_grad_()
        logprobs = torch.log_softmax(leaf, -1)
        term = loss_term("k1", logprobs, reference, logprobs.detach(), **given)
        return torch.autograd.grad((logprobs.detach().exp() * term).sum(), leaf)[0]

    leaf = scores.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, -1)
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), leaf)
    assert torch.allclose(gradient(**options), true, atol=1e-12) and torch.allclose(gradient(), torch.zeros(2, dtype=torch.float64), atol=1e-12)
