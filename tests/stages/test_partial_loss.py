"""Tokens of older weights in the update: their ratio goes to the policy that sampled them, and the engine is not blamed for their log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.protocols import Roles
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected
from rftcli.stages.credit import credit
from rftcli.stages.learn import one_update, policy_loss
from rftcli.stages.records import sample_line
from rftcli.types import Batch, Denominators, Experience, Group, TokenTrace

PARTIAL = "rollout={partial: {budget_tokens: 2}, max_version_lag: 4}"
SAMPLER = "algorithm.loss={old: sampler, clip_low: 1.0, clip_high: 1000.0}"
CORRECTED = "algorithm.loss={correction: {cap: 1000}}"
STALE = (0.25, 0.25, 0.5)
"""Probabilities of the tokens 0, 1, 2 under the weights that sampled."""
ADVANTAGES = (1.0, -2.0, 0.5)


def credited(made: SimpleNamespace, traces: Sequence[TokenTrace], *sets: str, version: int, table: Sequence[float]) -> tuple[list[Experience], Any]:
    """One group with an answer for each trace, through credit under a policy of `version` with the log-probs `table`."""
    plan = made.plan(PARTIAL, *sets, f"rollout.samples_per_prompt={len(traces)}", "batch.prompts_per_step=1")
    (group,) = made.groups({0: [float(index % 2) for index in range(len(traces))]})
    samples = tuple(replace(sample, completion=replace(sample.completion, trace=trace)) for sample, trace in zip(group.samples, traces, strict=True))
    policy = made.Table(SoloWorld(), table)
    policy.version = version
    collected = Collected(mini_batches=((Group(prompt=group.prompt, samples=samples),),), rollout_seconds=0.0, score_seconds=0.0)
    found = credit(collected, Roles(policy=policy), plan, SoloWorld(), pad_id=0, device=made.cpu)
    return list(found.mini_batches[0]), plan


def batch_of(rows: Sequence[Experience]) -> Batch:
    """The rows, one token each, as flat vectors; without inputs, which the loss does not read."""

    def flat(name: str) -> torch.Tensor | None:
        values = [getattr(row, name) for row in rows]
        return None if any(value is None for value in values) else torch.cat(values)

    targets = torch.cat([row.token_ids[row.prompt_tokens :] for row in rows])
    names = ("advantages", "old_logprobs", "sampler_logprobs", "correction", "stale")
    empty = torch.zeros(0, dtype=torch.int64)
    return Batch(
        input_ids=empty, position_ids=empty, attention_mask=None, select=empty, target_ids=targets,
        sequence=torch.arange(len(rows)), num_sequences=len(rows), reference_logprobs=None, values=None, returns=None,
        denominators=Denominators(tokens=len(rows), sequences=len(rows)), **{name: flat(name) for name in names},
    )  # fmt: skip


@pytest.mark.parametrize("setting", [SAMPLER, CORRECTED])
def test_the_gradient_of_old_tokens_is_that_of_the_policy_now(made: SimpleNamespace, setting: str) -> None:
    """Four answers of one token, as often as the old weights q sample each. Their mean gradient is sum_a p(a) A(a) grad log p(a), in closed form
    p(a) (A(a) - sum_b p(b) A(b)) for a softmax: nothing of q is left."""
    tokens = (0, 1, 2, 2)
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    now = torch.log_softmax(logits, 0)
    traces = [TokenTrace(ids=(token,), logprobs=(math.log(STALE[token]),), segments=((0, 3),)) for token in tokens]
    rows, plan = credited(made, traces, setting, version=5, table=now.tolist())
    assert all(row.stale is not None and row.stale.tolist() == [True] for row in rows)
    for row, token in zip(rows, tokens, strict=True):
        row.advantages = torch.tensor([ADVANTAGES[token]])
    batch = batch_of(rows)
    loss, sums = policy_loss(plan.loss, 4)(now[batch.target_ids], torch.zeros(4), batch)
    loss.backward()
    p = now.detach().exp()
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    assert logits.grad is not None and (-logits.grad).tolist() == pytest.approx((p * (advantages - (p * advantages).sum())).tolist(), abs=1e-6)
    assert float(sums["sampler_known"]) == 0.0  # old tokens say nothing about the engine


def test_only_tokens_of_the_newest_weights_are_compared_with_the_engine(made: SimpleNamespace) -> None:
    """Token 1 by version 4 and token 2 by 5, the policy's own: the gap is that of the second alone."""
    trace = TokenTrace(ids=(1, 2), logprobs=(-9.0, -1.25), segments=((0, 4), (1, 5)))
    rows, plan = credited(made, [trace, trace], SAMPLER, version=5, table=[-1.0] * 12)
    assert [row.stale.tolist() for row in rows] == [[True, False]] * 2
    assert [row.old_logprobs.tolist() for row in rows] == [[-9.0, -1.25]] * 2
    learner = made.Table(SoloWorld(), [-1.0] * 12)
    found = one_update(rows, learner, policy_loss(plan.loss, 4), plan, SoloWorld(), pad_id=0, device=made.cpu)
    assert (found.metrics["sampler_gap_mean"], found.metrics["sampler_gap_max"]) == (0.25, 0.25)


def test_without_partial_rollouts_nothing_is_marked(made: SimpleNamespace) -> None:
    plan = made.plan(SAMPLER)
    (group,) = made.groups({0: [1.0, 0.0]}, logprobs=(-1.0, -1.0))
    collected = Collected(mini_batches=((group,),), rollout_seconds=0.0, score_seconds=0.0)
    found = credit(collected, Roles(policy=made.Table(SoloWorld(), [-1.0] * 12)), plan, SoloWorld(), pad_id=0, device=made.cpu)
    assert [row.stale for row in found.mini_batches[0]] == [None, None]


def test_samples_tell_which_weights_sampled_what(made: SimpleNamespace) -> None:
    sample = made.sample(ids=(3, 4, 5))
    one, two = (
        sample_line(
            replace(sample, completion=replace(sample.completion, trace=replace(sample.completion.trace, segments=segments))), step=1, advantage=0.0
        )
        for segments in (((0, 4),), ((0, 2), (2, 4)))
    )
    assert "segments" not in one and two["segments"] == [[0, 2], [2, 4]]
