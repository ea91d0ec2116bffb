"""Aggregation: the same loss and gradient however the sequences are cut."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.losses import ppo_clip
from rftcli.algo.reduce import AGGREGATES, count_trained, token_weights

NAMES = sorted(AGGREGATES)


def weights_of(name: str, lengths: list[int], *, tokens: int | None = None, sequences: int | None = None, max_new_tokens: int = 8) -> torch.Tensor:
    """Weights of one micro-batch of sequences with these lengths; the denominators are its own unless given."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    return token_weights(
        name,
        sequence,
        len(lengths),
        tokens=sum(lengths) if tokens is None else tokens,
        sequences=sum(length > 0 for length in lengths) if sequences is None else sequences,
        max_new_tokens=max_new_tokens,
    )


@pytest.mark.parametrize(("name", "loss"), [("token_mean", 1.75), ("sequence_mean", 2.5), ("sequence_sum", 3.5), ("fixed_length", 0.4375)])
def test_numbers(name: str, loss: float) -> None:
    per_token = [torch.tensor([4.0]), torch.ones(3)]
    assert (weights_of(name, [1, 3]) * torch.cat(per_token)).sum().item() == pytest.approx(loss)
    split = sum((weights_of(name, [len(part)], tokens=4, sequences=2) * part).sum() for part in per_token)
    assert split.item() == pytest.approx(loss)


def test_token_mean_over_three_micro_batches() -> None:
    per_token = [torch.tensor([4.0]), torch.ones(3), torch.tensor([2.0, 2.0])]
    loss = sum((weights_of("token_mean", [len(part)], tokens=6, sequences=3) * part).sum() for part in per_token)
    assert loss.item() == pytest.approx(11 / 6)


def test_masked_out_sequence_leaves_both_sides() -> None:
    """A: 3 tokens, loss 2 each; B: 5 tokens, truncated and masked out."""
    masks = [torch.ones(3, dtype=torch.bool), torch.zeros(5, dtype=torch.bool)]
    assert count_trained(masks) == (3, 1)
    for name in ("token_mean", "sequence_mean"):
        assert (weights_of(name, [3, 0], tokens=3, sequences=1) * torch.full((3,), 2.0)).sum().item() == pytest.approx(2.0)


def test_counts() -> None:
    assert count_trained([]) == (0, 0)
    assert count_trained([torch.tensor([True, False, True]), torch.zeros(0, dtype=torch.bool), torch.tensor([True])]) == (3, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_without_trained_tokens(name: str) -> None:
    empty = weights_of(name, [0, 0], tokens=7, sequences=2)
    assert empty.shape == (0,) and empty.dtype == torch.float32
    parameter = torch.ones(0, requires_grad=True)
    (empty * parameter).sum().backward()
    assert parameter.grad is not None
    assert weights_of(name, [0], tokens=0, sequences=0).shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_denominators_smaller_than_the_micro_batch_are_a_mistake(name: str) -> None:
    with pytest.raises(AssertionError):
        weights_of(name, [2, 3], tokens=4, sequences=2)
    with pytest.raises(AssertionError):
        weights_of(name, [2], tokens=4, sequences=0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
def test_sums_of_weights(lengths: list[int]) -> None:
    tokens, sequences = sum(lengths), sum(length > 0 for length in lengths)
    sums = {name: weights_of(name, lengths, max_new_tokens=16).double().sum().item() for name in NAMES}
    assert sums == pytest.approx(
        {"token_mean": 1.0, "sequence_mean": 1.0, "sequence_sum": tokens / sequences, "fixed_length": tokens / sequences / 16}, rel=1e-5
    )


@given(st.data(), st.sampled_from(NAMES), st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any))
def test_any_split_gives_the_same_loss_and_gradient(data: st.DataObject, name: str, lengths: list[int]) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    old, noise, advantages = (torch.randn(sum(lengths), generator=generator) for _ in range(3))
    bounds = [0, *cuts, len(lengths)]

    def loss_and_gradient(parts: list[list[int]]) -> tuple[float, torch.Tensor]:
        new, total, first = (old + 0.3 * noise).requires_grad_(), 0.0, 0
        for part in parts:
            span = slice(first, first := first + sum(part))
            weights = weights_of(name, part, tokens=sum(lengths), sequences=sum(length > 0 for length in lengths))
            loss = (weights * ppo_clip(new[span], old[span], advantages[span], clip_low=0.2, clip_high=0.28).loss).sum()
            loss.backward()
            total += loss.item()
        return total, new.grad

    whole_loss, whole_gradient = loss_and_gradient([lengths])
    split = [lengths[start:end] for start, end in itertools.pairwise(bounds) if start < end]
    split_loss, split_gradient = loss_and_gradient(split)
    assert split_loss == pytest.approx(whole_loss, rel=1e-6, abs=1e-6)
    assert torch.allclose(split_gradient, whole_gradient, rtol=1e-6, atol=1e-7)
