"""Chunked log-probabilities: the plain computation's values and gradients, in less memory."""

import math

import pytest
import torch
from torch import Tensor, nn

from rftcli.algo.logprobs import chunked_logprobs, plain_logprobs

N, H, V = 11, 5, 37


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, nn.Linear]:
    torch.manual_seed(0)
    return torch.randn(N, H, dtype=dtype, requires_grad=True), torch.randint(V, (N,)), nn.Linear(H, V, dtype=dtype)


def test_numbers() -> None:
    logits, target = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    for temperature, logprob in ((1.0, -0.126928), (0.5, -0.018150)):
        logprobs, entropy = plain_logprobs(logits, target, temperature)
        assert logprobs.item() == pytest.approx(logprob, abs=5e-7)
        p = math.exp(logprob)
        assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=2e-6)


def test_uniform_and_impossible_words() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf]], requires_grad=True)
    logprobs, entropy = plain_logprobs(logits, torch.tensor([3, 0]), 0.7)
    assert logprobs.tolist() == pytest.approx([-math.log(4), -math.log(2)])
    assert entropy.tolist() == pytest.approx([math.log(4), math.log(2)])
    logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_large_logits_keep_their_digits() -> None:
    logprobs, _ = plain_logprobs(torch.tensor([[10_000.0, 9_990.0]]), torch.tensor([0]), 1.0)
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-10)), rel=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 11, 50])
def test_chunks_change_neither_values_nor_gradients(chunk: int, temperature: float) -> None:
    hidden, targets, head = problem(torch.float64)
    seed = torch.randn(N, dtype=torch.float32)
    expected, expected_entropy = plain_logprobs(head(hidden), targets, temperature)
    gradients = torch.autograd.grad(expected, [hidden, *head.parameters()], seed)
    logprobs, entropy = chunked_logprobs(hidden, targets, head, temperature=temperature, chunk=chunk)
    assert logprobs.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
    assert torch.allclose(logprobs, expected, rtol=1e-6) and torch.allclose(entropy, expected_entropy, rtol=1e-6)
    for actual, wanted in zip(torch.autograd.grad(logprobs, [hidden, *head.parameters()], seed), gradients, strict=True):
        assert torch.allclose(actual, wanted, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        silent, _ = chunked_logprobs(hidden, targets, head, temperature=temperature, chunk=chunk)
    assert torch.equal(silent, logprobs.detach()) and not silent.requires_grad


def test_gradient_is_the_difference_quotient() -> None:
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    probabilities = (logits.detach() / 0.8).softmax(-1)
    targets = torch.tensor([0, 5, 2])
    chunked_logprobs(logits, targets, lambda scores: scores, temperature=0.8, chunk=2)[0].sum().backward()
    assert torch.allclose(logits.grad, (nn.functional.one_hot(targets, 6) - probabilities) / 0.8, atol=1e-6)


def test_only_one_chunk_of_scores_is_alive() -> None:
    """No more positions than a chunk reach the head at once, and what the forward pass keeps is smaller than one N x V table."""
    hidden, targets, head = problem()
    rows, kept = [], []

    def watched(part: Tensor) -> Tensor:
        rows.append(len(part))
        return head(part)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = chunked_logprobs(hidden, targets, watched, temperature=1.0, chunk=4)
    assert rows == [4, 4, 3]
    assert sum(kept) < N * V
    logprobs.sum().backward()
    assert sorted(rows) == [3, 3, 4, 4, 4, 4]
    rows.clear()
    chunked_logprobs(hidden, targets, watched, temperature=1.0, chunk=N)[0].sum().backward()
    assert rows == [N]


def test_half_precision_head_is_scored_in_single() -> None:
    hidden, targets, head = problem(torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, targets, head, temperature=1.0, chunk=4)
    expected = torch.log_softmax(head(hidden).float(), -1)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, expected.gather(1, targets[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5)


def test_no_position() -> None:
    hidden, _, head = problem()
    logprobs, entropy = chunked_logprobs(hidden[:0], torch.zeros(0, dtype=torch.int64), head, temperature=1.0, chunk=4)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad.abs().sum() == 0 and hidden.grad.abs().sum() == 0


def test_a_greedy_policy_has_no_logprobs() -> None:
    hidden, targets, head = problem()
    with pytest.raises(AssertionError, match="temperature"):
        chunked_logprobs(hidden, targets, head, temperature=0.0, chunk=4)
    with pytest.raises(AssertionError):
        chunked_logprobs(hidden, targets, head, temperature=1.0, chunk=0)
    with pytest.raises(AssertionError):
        chunked_logprobs(hidden, targets[1:], head, temperature=1.0, chunk=4)


@pytest.mark.parametrize("chunk", [1, 3, 11, 50])
def test_each_token_at_a_temperature_of_its_own(chunk: int) -> None:
    """Row by row the plain computation at its one temperature, values and gradients."""
    hidden, targets, head = problem(torch.float64)
    temperatures = torch.linspace(0.5, 4.0, N)
    seed = torch.randn(N)
    single = [plain_logprobs(head(hidden[row : row + 1]), targets[row : row + 1], float(temperatures[row])) for row in range(N)]
    expected, expected_entropy = torch.cat([value for value, _ in single]), torch.cat([value for _, value in single])
    gradients = torch.autograd.grad(expected, [hidden, *head.parameters()], seed)
    logprobs, entropy = chunked_logprobs(hidden, targets, head, temperature=temperatures, chunk=chunk)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    for found, wanted in zip(torch.autograd.grad(logprobs, [hidden, *head.parameters()], seed), gradients, strict=True):
        torch.testing.assert_close(found, wanted)
    same, _ = chunked_logprobs(hidden, targets, head, temperature=torch.full((N,), 0.6), chunk=chunk)
    torch.testing.assert_close(same, chunked_logprobs(hidden, targets, head, temperature=0.6, chunk=chunk)[0])
