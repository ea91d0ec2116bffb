import math

import pytest
import torch

from rftcli.engines.sampling import choose_greedily, draw, keep_min_p, keep_top_k, keep_top_p, log_weights, logprobs_of

FOUR = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def kept(weights: torch.Tensor) -> list[int]:
    return weights[0].isfinite().nonzero().flatten().tolist()


def pick(weights: torch.Tensor, *numbers: float) -> tuple[list[int], list[float]]:
    ids, logprobs = drawn(weights.expand(len(numbers), -1), torch.tensor(numbers, dtype=torch.float64))
    return ids.tolist(), logprobs.tolist()


def drawn(weights: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mass = draw(weights, numbers)
    return ids, logprobs_of(weights, ids, mass)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.126928), (0.5, -0.018150)])
def test_the_logprob_is_of_the_tempered_distribution(temperature, expected):
    ids, logprobs = pick(log_weights(torch.tensor([[2.0, 0.0]]), temperature=temperature), 0.1)
    assert ids == [0] and logprobs == pytest.approx([expected], abs=1e-6)


def test_the_inverse_of_the_cumulative_distribution():
    ids, logprobs = pick(log_weights(FOUR, temperature=1.0), 0.0, 0.4999, 0.5001, 0.7999, 0.8001, 0.9499, 0.9501, 1 - 2**-53)
    assert ids == [0, 0, 1, 1, 2, 2, 3, 3]
    assert logprobs == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.3, 0.3, 0.15, 0.15, 0.05, 0.05)], abs=1e-6)


def test_a_token_without_probability_is_never_taken():
    weights = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]], dtype=torch.float64)
    assert pick(weights, 0.0, 0.25, 0.5, 1 - 2**-53)[0] == [1, 1, 3, 3]


def test_off_means_off():
    scores = torch.linspace(0.0, -30.0, 200)[None]
    assert kept(log_weights(scores, temperature=1.0)) == list(range(200))


@pytest.mark.parametrize(("top_k", "expected"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k(top_k, expected):
    assert kept(keep_top_k(FOUR, top_k)) == expected


def test_top_k_keeps_ties_with_the_last():
    assert kept(keep_top_k(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), 2)) == [0, 1, 2]


@pytest.mark.parametrize(("top_p", "expected"), [(1e-9, [0]), (0.49, [0]), (0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (0.96, [0, 1, 2, 3])])
def test_top_p_is_the_smallest_set_of_that_mass(top_p, expected):
    assert kept(keep_top_p(FOUR.double(), top_p)) == expected


@pytest.mark.parametrize(("min_p", "expected"), [(0.05, [0, 1, 2, 3]), (0.11, [0, 1, 2]), (0.31, [0, 1]), (0.61, [0])])
def test_min_p_is_relative_to_the_most_probable(min_p, expected):
    assert kept(keep_min_p(FOUR.double(), min_p)) == expected


def test_filters_apply_after_the_temperature_and_one_after_the_other():
    # at temperature 0.5 the weights are squares: .25 .09 .0225 .0025; top-k 3 leaves .3625, of which .69, .25, .06: top-p 0.9 keeps two
    weights = log_weights(FOUR, temperature=0.5, top_k=3, top_p=0.9)
    assert kept(weights) == [0, 1]
    assert pick(weights, 0.0, 0.99)[1] == pytest.approx([math.log(0.25 / 0.34), math.log(0.09 / 0.34)], abs=1e-6)
    assert kept(log_weights(FOUR, temperature=0.5, top_k=3, top_p=0.9, min_p=0.4)) == [0]


def test_rows_do_not_see_each_other():
    scores = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    numbers = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = log_weights(scores, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
    ids, logprobs = drawn(weights, numbers)
    for row in range(7):
        alone = drawn(log_weights(scores[row : row + 1], temperature=0.8, top_k=20, top_p=0.9, min_p=0.01), numbers[row : row + 1])
        assert (ids[row], logprobs[row]) == (alone[0][0], alone[1][0])


def test_greedy_takes_the_first_of_the_best():
    assert choose_greedily(torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_scores_that_are_not_numbers_have_no_token(broken):
    scores = torch.tensor([[0.0, broken, 1.0], [0.0, 1.0, 2.0]])
    assert choose_greedily(scores).tolist() == [-1, 2]
    ids, _ = draw(log_weights(scores, temperature=1.0), torch.tensor([0.5, 0.999], dtype=torch.float64))
    assert ids.tolist() == [-1, 2]
