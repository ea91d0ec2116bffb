"""What the ranks of `test_reduced_once.py` do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from work import experiences, learner_of, plan_of, share

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter", "all_to_all_single")


def reduced(world: Any, *, zero: int, dtype: str = "float32", rows: int = 2) -> list[int]:
    """Numbers handed to reductions behind each micro-batch of one update, and in its step; what the run's own statistics sum is left out."""
    from rftcli.stages.learn import one_update, policy_loss

    learner, plan = learner_of(world, zero=zero, dtype=dtype), plan_of("padded", rows, "token_mean", kl=0.1)
    counted, told = [0], []
    usual = {name: getattr(dist, name) for name in REDUCTIONS if hasattr(dist, name)}

    def watched(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [item for item in (*arguments, *options.values()) if isinstance(item, torch.Tensor)]
            counted[0] += max((tensor.numel() for tensor in tensors), default=0)
            return usual[name](*arguments, **options)

        return call

    def behind(work: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counted[0] = 0
            result = work(*arguments, **options)
            told.append(counted[0])
            return result

        return call

    for name in usual:
        setattr(dist, name, watched(name))
    try:
        learner.backward, learner.step = behind(learner.backward), behind(learner.step)
        one_update(share(world, experiences(), uneven=False), learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=torch.device("cpu"))
    finally:
        for name, function in usual.items():
            setattr(dist, name, function)
    return told
