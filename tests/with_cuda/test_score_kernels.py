"""On a GPU: `python -m pytest tests/with_cuda`. The kernels that read scores say what plain torch says, gradients included."""

from __future__ import annotations

import pytest
import torch

from rftcli.algo.logprobs import chunked_logprobs, plain_logprobs
from rftcli.models.score_kernels import WORDS, fused_logprobs
from rftcli.models.scores import kernels_work

CUDA = torch.device("cuda")


def both(scores: torch.Tensor, temperature: float | torch.Tensor, *, entropy_gradient: bool) -> list[tuple[torch.Tensor, ...]]:
    """Log-probs, entropies and the gradient of both ways, the plain one from float64."""
    rows, words = scores.shape
    generator = torch.Generator(CUDA).manual_seed(1)
    targets = torch.randint(words, (rows,), device=CUDA, generator=generator)
    targets = torch.where(scores.gather(1, targets[:, None])[:, 0].isneginf(), scores.argmax(1), targets)
    weights = torch.randn(2, rows, device=CUDA, generator=generator)
    found = []
    for way, given in ((plain_logprobs, scores.double()), (fused_logprobs, scores)):
        leaf = given.detach().clone().requires_grad_()
        if way is plain_logprobs:
            table = torch.log_softmax(leaf / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature), -1)
            logprobs = table.gather(1, targets[:, None])[:, 0]
            entropies = -(table.exp() * table.masked_fill(table.isneginf(), 0.0)).sum(1)
        else:
            logprobs, entropies = way(leaf, targets, temperature, entropy_gradient=entropy_gradient)
        loss = (weights[0] * logprobs).sum()
        if entropy_gradient:
            loss = loss + (weights[1] * entropies).sum()
        loss.backward()
        found.append((logprobs.detach(), entropies.detach(), leaf.grad))
    return found


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("words", [7, WORDS, 49152, 151936])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
def test_values_and_gradients_are_those_of_float64(words: int, dtype: torch.dtype, close: float, entropy_gradient: bool) -> None:
    torch.manual_seed(0)
    scores = (torch.randn(37, words, device=CUDA) * 5).to(dtype)
    scores[0, : words // 2] = float("-inf")
    for temperature in (1.0, 0.6, torch.rand(37, device=CUDA) + 0.5):
        (logprobs, entropies, gradient), (fused, fused_entropies, fused_gradient) = both(scores, temperature, entropy_gradient=entropy_gradient)
        assert (logprobs - fused).abs().max() < 2e-5 and (entropies - fused_entropies).abs().max() < 5e-5  # sums are float32 for every type
        assert (gradient - fused_gradient).norm() <= close * gradient.norm()
        assert fused_gradient.dtype == dtype


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    scores = torch.zeros(2, 5000, device=CUDA)
    scores[1, 4321] = bad
    logprobs, entropies = fused_logprobs(scores, torch.tensor([3, 3], device=CUDA), 1.0)
    assert logprobs[0].isfinite() and entropies[0].isfinite()
    assert logprobs[1].isnan() and entropies[1].isnan()


def test_no_rows_and_rows_that_are_a_view() -> None:
    logprobs, entropies = fused_logprobs(torch.zeros(0, 50, device=CUDA), torch.zeros(0, dtype=torch.int64, device=CUDA), 1.0)
    assert logprobs.shape == entropies.shape == (0,)
    wide = torch.randn(9, 600, device=CUDA)
    view, targets = wide[:, 100:400], torch.arange(9, device=CUDA)
    assert torch.equal(fused_logprobs(view, targets, 1.0)[0], fused_logprobs(view.contiguous(), targets, 1.0)[0])


def test_chunks_and_the_recomputation_in_the_backward_pass_change_nothing() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(100, 64, device=CUDA), torch.nn.Linear(64, 9000, bias=False, device=CUDA)
    targets = torch.randint(9000, (100,), device=CUDA)
    found = []
    for read, chunk in ((plain_logprobs, 100), (fused_logprobs, 17)):
        leaf = hidden.clone().requires_grad_()
        head.zero_grad()
        logprobs, entropies = chunked_logprobs(leaf, targets, head, temperature=0.8, chunk=chunk, read=read)
        logprobs.square().sum().backward()
        found.append((logprobs, entropies, leaf.grad, head.weight.grad.clone()))
    for plain, fused in zip(*found, strict=True):
        assert (plain - fused).norm() <= 1e-4 * plain.norm()


def test_this_card_runs_them() -> None:
    assert kernels_work(CUDA) is None
