"""What must not change a loss or its gradient, for every row of LOSSES and KLS: the size of advantages, a shift of both log-probs, other answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.algo.kl import KLS, loss_term
from rftcli.algo.losses import CHOOSING, LOSSES

CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
OPTIONS: dict[str, Mapping[str, Any]] = {
    "ppo_clip": {**CLIPS, "dual_clip": 1.5},
    "rloo_sequence": {**CLIPS, "dual_clip": None},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": None},
    "gmpo": {"clip_low": 0.1, "clip_high": 0.2},
    "cispo": {"clip_low": 0.2, "clip_high": 0.3},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "cpg": {**CLIPS, "drift": 0.0, "drift_bound": None},
    "clip_cov": {**CLIPS, "dual_clip": None},
    "kl_cov": {"beta": 0.0},
    "reinforce": {"importance_weight": True},
    "dro": {"beta": 0.0},
    "python": {"function": lambda new, old, advantages: -advantages * (new - old).exp()},
}
"""Without the terms that advantages do not touch: drift, the penalty of kl_cov, dro's parabola. A new loss belongs here."""
LOG_PROBS = ("cispo", "cpg", "reinforce", "dro")
"""Losses whose value is a log-prob times a weight, so that a shift moves the value, never the gradient."""
CORNERS = st.floats(-1.0, 1.0).filter(lambda x: all(abs(x - math.log(bound)) > 1e-3 for bound in (0.8, 1.3, 1.5, 0.95, 1.1)))


def test_every_loss_is_here() -> None:
    assert set(OPTIONS) == set(LOSSES)
    for name, row in LOSSES.items():
        assert set(OPTIONS[name]) - {"function"} == set(row.options) - set(CHOOSING)


@st.composite
def updates(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], list[int]]:
    """(new - old, old, advantages, lengths): answers with one advantage each."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    total = sum(lengths)
    advantages = [value for length in lengths for value in [draw(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0]))] * length]
    differences = draw(st.lists(CORNERS, min_size=total, max_size=total))
    return differences, draw(st.lists(st.floats(-3, 0), min_size=total, max_size=total)), advantages, lengths


Drawn = tuple[list[float], list[float], list[float], list[int]]


def run(name: str, update: Drawn, *, times: float = 1.0, shift: float = 0.0) -> tuple[Any, torch.Tensor]:
    """(terms, gradient) in float64, of advantages `times` as large and log-probs moved by `shift`."""
    differences, start, advantages, lengths = update
    old = torch.tensor(start, dtype=torch.float64) + shift
    new = (torch.tensor(start, dtype=torch.float64) + torch.tensor(differences, dtype=torch.float64) + shift).requires_grad_()
    given_by_name = {
        "sequence": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), "num_sequences": len(lengths),
        "chosen": torch.arange(len(start)) % 3 == 0,
    }  # fmt: skip
    row = LOSSES[name]
    terms = row.function(
        new, old, times * torch.tensor(advantages, dtype=torch.float64), **OPTIONS[name], **{key: given_by_name[key] for key in row.reads}
    )
    return terms, torch.autograd.grad(terms.loss.sum(), new)[0]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20)
@given(update=updates(), times=st.sampled_from([0.5, 3.0, 1e6]))
def test_loss_and_gradient_grow_with_the_advantage(name: str, update: Drawn, times: float) -> None:
    one, gradient = run(name, update)
    more, steeper = run(name, update, times=times)
    assert torch.allclose(more.loss, times * one.loss, rtol=1e-12) and torch.allclose(steeper, times * gradient, rtol=1e-12)
    assert torch.equal(more.ratio, one.ratio)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20)
@given(update=updates(), shift=st.sampled_from([-7.0, 0.5]))
def test_only_the_difference_of_log_probs_pulls(name: str, update: Drawn, shift: float) -> None:
    one, gradient = run(name, update)
    moved, same = run(name, update, shift=shift)
    assert torch.allclose(same, gradient, atol=1e-9) and torch.allclose(moved.ratio, one.ratio, rtol=1e-9)
    if name not in LOG_PROBS:
        assert torch.allclose(moved.loss, one.loss, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if "chosen" not in row.reads])
@settings(max_examples=20)
@given(update=updates())
def test_an_answer_does_not_see_the_others(name: str, update: Drawn) -> None:
    """So that micro-batches may be cut between any two of them. (Which tokens are chosen is the business of the whole update.)"""
    differences, old, advantages, lengths = update
    whole, gradient = run(name, update)
    first = 0
    for length in lengths:
        span = slice(first, first + length)
        first += length
        alone, slope = run(name, (differences[span], old[span], advantages[span], [length]))
        assert torch.allclose(alone.loss, whole.loss[span], rtol=1e-12) and torch.allclose(slope, gradient[span], rtol=1e-12)


REFERENCES: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d, "abs": abs,
}  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KLS)
@settings(max_examples=25)
@given(rows=st.lists(st.tuples(st.floats(-3, 3).filter(lambda d: abs(d) > 1e-3), st.floats(-1, 1)), min_size=1, max_size=5))
def test_the_kl_term_against_its_formula_and_by_finite_differences(kind: str, weighted: bool, rows: Sequence[tuple[float, float]]) -> None:
    """d = new - reference, r = new - old; with `ratio_weighted` exp(r) k(d), the gradient of both."""

    def value(d: float, r: float) -> float:
        return (math.exp(r) if weighted else 1.0) * REFERENCES[kind](d)

    d, r = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    new = torch.full_like(d, -2.0).requires_grad_()
    term = loss_term(kind, new, new.detach() - d, new.detach() - r, ratio_weighted=weighted)
    assert term.tolist() == pytest.approx([value(*row) for row in rows], rel=1e-9, abs=1e-12)
    (gradient,) = torch.autograd.grad(term.sum(), new)
    step = 1e-6
    for row, slope in zip(rows, gradient.tolist(), strict=True):
        measured = (value(row[0] + step, row[1] + step) - value(row[0] - step, row[1] - step)) / (2 * step)
        assert slope == pytest.approx(measured, rel=1e-5, abs=1e-6)
