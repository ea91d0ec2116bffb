"""`algo.logprobs.plain_logprobs` as Triton kernels: each score is read once forward, and once backward, where it becomes its gradient.

The plain computation goes over (N, V) scores some ten times in each direction, in float32; with 150,000 words those passes cost more than the
multiplications that make the scores. Sums are float32 whatever the scores are, so values agree with the plain computation to its own rounding.

Imported only where Triton is (`models.scores`). The sum over the words is the online softmax of Milakov and Gimelshein (2018), arXiv:1805.02867, with
the entropy's sum beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

WORDS = 4096
"""Scores that a program holds at once."""


@triton.jit
def _forward(scores, targets, temperatures, logprobs, entropies, normalisers, stride, words: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    target = tl.load(targets + row)
    places = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)  # of each lane: largest score, sum of exp, and that sum weighted with the scores
    mass = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, words, BLOCK):
        columns = start + places
        score = tl.load(scores + row * stride + columns, mask=columns < words, other=float("-inf")).to(tl.float32) / temperature
        possible = score != float("-inf")  # what is not a number counts, and makes the sums none either
        larger = tl.maximum(most, score)
        share = tl.where(possible, tl.exp(score - larger), 0.0)
        shrink = tl.where(most > float("-inf"), tl.exp(most - larger), 0.0)
        mass = mass * shrink + share
        weighted = weighted * shrink + tl.where(possible, share * score, 0.0)
        most = larger
    largest = tl.max(most, 0)
    shrink = tl.where(most > float("-inf"), tl.exp(most - largest), 0.0)
    total = tl.sum(mass * shrink, 0)
    normaliser = largest + tl.log(total)
    chosen = tl.load(scores + row * stride + target).to(tl.float32) / temperature
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(entropies + row, normaliser - tl.sum(weighted * shrink, 0) / total)
    tl.store(normalisers + row, normaliser)


@triton.jit
def _backward(
    scores, targets, temperatures, entropies, normalisers, of_logprobs, of_entropies, gradients, stride, words: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < words
    temperature = tl.load(temperatures + row)
    normaliser = tl.load(normalisers + row)
    gain = tl.load(of_logprobs + row)
    logprob = tl.load(scores + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32) / temperature - normaliser
    share = tl.exp(logprob)
    gradient = gain * (tl.where(columns == tl.load(targets + row), 1.0, 0.0) - share)
    if ENTROPY:
        surprise = tl.where(share > 0.0, logprob + tl.load(entropies + row), 0.0)
        gradient -= tl.load(of_entropies + row) * share * surprise
    tl.store(gradients + row * words + columns, (gradient / temperature).to(gradients.dtype.element_ty), mask=inside)


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, temperatures: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        rows, words = scores.shape
        if scores.stride(1) != 1:
            scores = scores.contiguous()
        logprobs, entropies, normalisers = (scores.new_empty(rows, dtype=torch.float32) for _ in range(3))
        if rows:
            _forward[(rows,)](scores, targets, temperatures, logprobs, entropies, normalisers, scores.stride(0), words, BLOCK=WORDS, num_warps=8)
        ctx.save_for_backward(scores, targets, temperatures, entropies, normalisers)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor, None, None, None]:
        scores, targets, temperatures, entropies, normalisers = ctx.saved_tensors
        rows, words = scores.shape
        gradients = torch.empty_like(scores, memory_format=torch.contiguous_format)
        if rows:
            _backward[(rows, triton.cdiv(words, WORDS))](
                scores, targets, temperatures, entropies, normalisers, of_logprobs.contiguous(), of_entropies.contiguous(), gradients,
                scores.stride(0), words, ENTROPY=ctx.entropy_gradient, BLOCK=WORDS, num_warps=8,
            )  # fmt: skip
        return gradients, None, None, None


def fused_logprobs(scores: Tensor, targets: Tensor, temperature: float | Tensor, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """`plain_logprobs`: (log-probs (N,), entropy (N,)), float32 nats, of scores (N, V) in any floating type, whose gradient has their type."""
    if isinstance(temperature, Tensor):
        temperatures = temperature.to(torch.float32).contiguous()
    else:
        assert temperature > 0, f"temperature {temperature}: a greedy choice has no log-probability to train on"
        temperatures = torch.full((len(targets),), temperature, dtype=torch.float32, device=scores.device)
    return _Scored.apply(scores, targets.contiguous(), temperatures, entropy_gradient)
