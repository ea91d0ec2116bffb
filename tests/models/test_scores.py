"""The way a head's scores are read is the same on all ranks, and never changes what is read."""

from __future__ import annotations

import torch

from rftcli.algo.logprobs import chunked_logprobs, plain_logprobs
from rftcli.models.scores import kernels_work, positions_at_once, reader


def test_without_a_gpu_scores_are_read_by_plain_torch() -> None:
    assert kernels_work(torch.device("cpu")) == "no GPU"
    assert reader(False) is plain_logprobs


def test_more_positions_fit_where_no_copies_in_float32_are_held() -> None:
    assert [positions_at_once(dtype, True) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [2, 4, 4]
    assert positions_at_once(torch.bfloat16, False) == 1


def test_chunks_are_read_by_what_is_given() -> None:
    seen = []

    def read(scores: torch.Tensor, targets: torch.Tensor, temperature: float, *, entropy_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((scores.shape[0], temperature, entropy_gradient))
        return plain_logprobs(scores, targets, temperature, entropy_gradient=entropy_gradient)

    hidden, head = torch.randn(5, 4, requires_grad=True), torch.nn.Linear(4, 9)
    targets = torch.arange(5)
    found, _ = chunked_logprobs(hidden, targets, head, temperature=0.5, chunk=2, entropy_gradient=True, read=read)
    assert seen == [(2, 0.5, True), (2, 0.5, True), (1, 0.5, True)]
    expected, _ = plain_logprobs(head(hidden), targets, 0.5)
    assert torch.allclose(found, expected)
    found.sum().backward()
    assert len(seen) == 6, "scored again in the backward pass"
