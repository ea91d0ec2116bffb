"""The teacher's part of a step: its log-probs of what was sampled, and its term in the advantages.

What it leaves out: the teacher itself (a model here or behind a server), and the estimator `distill` alone (`token_credit`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rftcli.algo.answer_advantages import distill
from rftcli.protocols import World
from rftcli.types import Experience


def add_teacher(experiences: Sequence[Experience], coefficient: float) -> None:
    """The teacher's term, added to the finished advantage of every trained token."""
    for item in experiences:
        assert item.old_logprobs is not None and item.teacher_logprobs is not None, "the teacher's term reads both log-probs"
        term = distill(item.old_logprobs, item.teacher_logprobs, coefficient=coefficient)
        item.advantages = torch.where(item.mask, item.advantages + term, 0.0)


def teacher_metrics(experiences: Sequence[Experience], world: World) -> dict[str, float]:
    """`teacher_kl`: mean of old - teacher over the trained tokens of all ranks, the reverse KL from the teacher. Collective."""
    sums, tokens = 0.0, 0
    for item in experiences:
        assert item.old_logprobs is not None and item.teacher_logprobs is not None
        sums += float((item.old_logprobs - item.teacher_logprobs)[item.mask].double().sum())
        tokens += int(item.mask.sum())
    total, count = world.sum([sums, tokens])
    return {"teacher_kl": total / count} if count else {}
