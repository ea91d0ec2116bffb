"""Edges of every row of the tables, so that a new row is covered by itself: nothing, one of its kind, all alike, numbers without bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from rftcli.algo.advantages import ADVANTAGES, Advantage
from rftcli.algo.kl import KLS, loss_term
from rftcli.algo.losses import CHOOSING, LOSSES
from rftcli.algo.reduce import AGGREGATES, token_weights
from rftcli.algo.returns import token_rewards, value_loss, white_completions, white_tokens

Step = Sequence[Sequence[tuple[float, int]]]
"""Groups of scored completions: (reward, trained tokens)."""

STEPS: dict[str, Step] = {
    "no completion": [],
    "one completion": [[(1.0, 3)]],
    "one scored of its group": [[(0.7, 2)], [(1.0, 1), (0.0, 4), (0.0, 2), (1.0, 1)]],
    "all alike": [[(0.1, 2)] * 8],
    "all alike in two groups": [[(1 / 3, 1), (1 / 3, 5)], [(-0.7, 2)] * 3],
    "alike but for rounding": [[(0.1 + 0.2, 1), (0.3, 1)], [(1e6, 1), (1e6 + 1e-3, 2)]],
    "no token at all": [[(1.0, 0), (0.0, 0)]],
    "an answer without a token": [[(1.0, 0), (0.0, 3), (0.5, 1)]],
    "huge": [[(1e30, 1), (-1e30, 3), (0.0, 1)], [(1.0, 1), (0.0, 1)]],
    "huge and alike": [[(1e30, 2)] * 4, [(-1e30, 1)] * 2],
    "huge beside a huge constant": [[(1e30, 1), (1e30 - 1e16, 1)]],
    "tiny": [[(1e-30, 1), (0.0, 1)]],
}
VALUES: dict[str, tuple[Any, ...]] = {
    "normalise_std": (True, False),
    "std": ("group", "batch"),
    "min_std": (0.0, 0.1),
    "baseline": ("none", "batch"),
    "gamma": (1.0, 0.5),
    "lam": (1.0, 0.0),
    "coefficient": (0.5,),
}
"""Option of an estimator -> values of it. A new option belongs here."""


def variants(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*(VALUES[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def known(step: Step) -> dict[str, torch.Tensor]:
    """Everything that an estimator may ask for."""
    members = [(index, reward, length) for index, group in enumerate(step) for reward, length in group]
    rewards = torch.tensor([reward for _, reward, _ in members], dtype=torch.float64)
    lengths = torch.tensor([length for _, _, length in members], dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(members)), lengths)
    tokens = sequence.numel()
    return {
        "rewards": rewards, "group": torch.tensor([17 * (index + 3) % 11 for index, _, _ in members], dtype=torch.int64), "lengths": lengths,
        "greedy_rewards": rewards.clone(), "own": rewards, "scores": rewards[:, None].repeat(1, 2), "weights": torch.full((len(members), 2), 0.5),
        "present": torch.tensor([[True, index % 2 == 0] for index, _, _ in members], dtype=torch.bool).reshape(len(members), 2),
        "token_rewards": token_rewards(rewards, sequence), "sequence": sequence, "values": torch.zeros(tokens),
        "old": torch.full((tokens,), -1.0), "teacher": torch.full((tokens,), -torch.inf), "bootstrap": torch.zeros(len(members)),
    }  # fmt: skip


def asked(row: Advantage, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [given[name] for name in row.inputs]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_gives_numbers(name: str, step: str) -> None:
    """Finite, one for each of what it is for, and without a gradient."""
    row, given = ADVANTAGES[name], known(STEPS[step])
    count = given["sequence" if row.level == "token" else "rewards"].numel()
    for options in variants(row.options):
        found = row.function(*asked(row, given), **options)
        assert found.dtype == torch.float32 and found.shape == (count,) and not found.requires_grad
        assert torch.isfinite(found).all(), (options, found)
    if row.per_token is not None:
        found = row.per_token(given["token_rewards"], given["sequence"], gamma=0.5)
        assert found.shape == given["sequence"].shape and torch.isfinite(found).all()


ALIKE = ("one completion", "all alike", "all alike in two groups", "alike but for rounding", "huge and alike", "huge beside a huge constant")


@pytest.mark.parametrize("step", ALIKE)
@pytest.mark.parametrize("name", [name for name, row in ADVANTAGES.items() if row.baseline])
def test_equal_rewards_are_exactly_zero_in_a_group(name: str, step: str) -> None:
    row, given = ADVANTAGES[name], known(STEPS[step])
    for options in variants(row.options):
        assert not row.function(*asked(row, given), **options).any(), options


@pytest.mark.parametrize("name", [name for name, row in ADVANTAGES.items() if row.baseline])
def test_a_group_of_one_changes_nothing_for_the_others(name: str) -> None:
    """Nor do groups that are alike, but where the formula itself counts groups (gpg) or reads the whole step (`std: batch`)."""
    alone: Step = [[(1.0, 1), (0.25, 2), (0.0, 3)]]
    beside: Step = [*alone, [(0.9, 4)], [(0.1, 2)] * 3]
    row = ADVANTAGES[name]
    for options in variants(row.options):
        if name == "gpg" or options.get("std") == "batch":
            continue
        one, other = (row.function(*asked(row, known(step)), **options) for step in (alone, beside))
        assert torch.equal(other[:3], one) and not other[3:].any(), options


def test_alike_without_a_group_too() -> None:
    """The mean of a step, and a twin: rewards that equal them are exactly 0."""
    for step in ("all alike", "huge and alike"):
        given = known(STEPS[step][:1])
        assert not ADVANTAGES["reinforce"].function(given["rewards"], baseline="batch").any()
        assert not ADVANTAGES["remax"].function(given["rewards"], given["greedy_rewards"]).any()


# losses

LOSS_VALUES: dict[str, Any] = {
    "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "tau_positive": 1.0, "tau_negative": 1.05, "drift": 0.5, "drift_bound": 2.0, "beta": 0.1,
    "importance_weight": True,
}  # fmt: skip
"""Option of a loss -> a value of it. A new option belongs here."""


def terms_of(name: str, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, lengths: Sequence[int]) -> Any:
    row = LOSSES[name]
    given = {
        "sequence": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        "num_sequences": len(lengths),
        "chosen": torch.arange(new.numel()) % 2 == 0,
    }
    options = {option: LOSS_VALUES[option] for option in row.options if option not in CHOOSING}
    own = {"function": lambda new, old, advantages: -advantages * new} if name == "python" else {}
    return row.function(new, old, advantages, **options, **own, **{key: given[key] for key in row.reads})


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_gives_numbers(name: str, aggregate: str) -> None:
    """No token, answers without any, advantages of 1e30 and of 0: loss and gradient are finite, in float32."""
    for lengths in ([], [0, 0], [0, 3, 0], [1], [2, 0, 4]):
        tokens = sum(lengths)
        for size in (1e30, 1.0, 0.0):
            new = torch.linspace(-4.0, 0.0, tokens).requires_grad_()
            old = new.detach() + torch.linspace(-0.3, 0.3, tokens)
            advantages = size * torch.linspace(1.0, -1.0, tokens)
            terms = terms_of(name, new, old, advantages, lengths)
            sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
            weights = token_weights(
                aggregate, sequence, len(lengths), tokens=tokens, sequences=sum(length > 0 for length in lengths), max_new_tokens=8
            )
            (weights * terms.loss).sum().backward()
            assert terms.loss.shape == terms.ratio.shape == weights.shape == (tokens,)
            assert new.grad is not None
            for found in (terms.loss, terms.ratio, new.grad):
                assert torch.isfinite(found).all(), (lengths, size)


@pytest.mark.parametrize("name", LOSSES)
def test_an_advantage_of_zero_pulls_nowhere_on_policy(name: str) -> None:
    """Whatever the log-probs are: what a group without signal adds to the gradient is exactly 0."""
    new = torch.tensor([-1e-8, -0.5, -40.0, -1e4], requires_grad=True)
    terms = terms_of(name, new, new.detach(), torch.zeros(4), [1, 3])
    terms.loss.sum().backward()
    assert not terms.loss.any() and new.grad is not None and not new.grad.any()
    for flags in (terms.clipped_low, terms.clipped_high):
        assert flags is None or not flags.any()


@pytest.mark.parametrize("kind", KLS)
def test_every_estimate_of_the_kl_gives_numbers(kind: str) -> None:
    for options in ({}, {"unbiased_gradient": True}, {"ratio_weighted": True}):
        for new, reference in (([], []), ([0.0, -1e4, -3.0], [-1e4, 0.0, -3.0])):
            leaf = torch.tensor(new, requires_grad=True)
            term = loss_term(kind, leaf, torch.tensor(reference), leaf.detach(), **options)
            term.sum().backward()
            assert torch.isfinite(term).all() and leaf.grad is not None and torch.isfinite(leaf.grad).all()
            assert not term[2:].any(), "equal policies have no divergence"


def test_the_critics_loss_and_whitening_give_numbers() -> None:
    huge = torch.tensor([1e15, -1e15], requires_grad=True)
    loss = value_loss(huge, huge.detach(), torch.tensor([0.0, 0.0]), clip=0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and huge.grad is not None and torch.isfinite(huge.grad).all()
    for values in ([], [1e30], [1e30] * 3, [1e30, -1e30], [0.1] * 7):
        x = torch.tensor(values, dtype=torch.float64)
        white = white_completions(x)
        assert torch.isfinite(white).all() and white.abs().max().item() < 3 if values else white.numel() == 0
        if len(set(values)) == 1:
            assert not white.any()
        if values:
            mean = float(x.mean())
            assert torch.isfinite(white_tokens(x, mean=mean, variance=float((x - mean).square().mean()))).all()
