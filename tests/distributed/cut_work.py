"""Models that are cut before DeepSpeed wraps them. As `work.py`, whose helpers it uses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import models_work
import work


def gradient(world: Any, **how: Any) -> Any:
    return work.gradient(world, layout="packed", micro=4, zero=3, **how)


def updates(world: Any, **how: Any) -> Any:
    return work.several_updates(world, zero=3, updates=3, **how)


def lora(world: Any, **how: Any) -> Any:
    return models_work.lora_gradient(world, zero=3, dtype="float32", **how)


def proof(world: Any, *, from_host: bool) -> Any:
    """What the proof measures by the ranks' parts, and that the ranks train on afterwards all the same."""
    from rftcli.models.probe import agreement
    from rftcli.stages.learn import one_update, policy_loss

    none_stays = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    learner = work.learner_of(world, zero=3, from_host=from_host, extra=none_stays)
    found = agreement(learner.module, temperature=0.8)
    held = max(parameter.numel() for parameter in learner.module.parameters())
    plan = work.plan_of("padded", 3, "token_mean", kl=0.1)
    mine = work.share(world, work.experiences(), uneven=False)
    update = one_update(mine, learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=torch.device("cpu"))
    return {"head": found.head, "layouts": found.layouts, "worst": found.worst, "held": held, "norm": update.grad_norm}


def one_truth(world: Any) -> Any:
    """Ranks that loaded different weights: those of rank 0 count. (sum of weights by the first rank's own, sum of what is trained)"""
    from rftcli.models.policy import CausalPolicy
    from rftcli.runtime.learner import cut

    model = work.tiny_model(seed=world.rank)
    own = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    config = work.learner_of(world, zero=3).plan.deepspeed
    policy = CausalPolicy(model)
    cut(policy, config, torch.device("cpu"))
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(policy.parameters())):
        trained = sum(float(parameter.detach().double().sum()) for parameter in policy.parameters())
    return own, trained


def reference(world: Any, *, from_host: bool) -> Any:
    """Log-probs of each rank's completions under a frozen model: whole on every rank, or (`from_host`) a part on each."""
    from rftcli.models.policy import CausalPolicy
    from rftcli.runtime.reference import ModelReference, ShardedReference
    from rftcli.runtime.sharding import partitioned
    from rftcli.stages import batches

    policy, cpu = CausalPolicy(work.tiny_model(seed=4)), torch.device("cpu")
    if from_host:
        held: Any = ShardedReference(partitioned(policy.requires_grad_(False), "float32", cpu))
    else:
        held = ModelReference(policy, cpu, offload=False, refresh_every=0, mix=0.5, writes=False)
    plan = work.plan_of("padded", 3, "token_mean", kl=0.1)
    mine = work.share(world, work.experiences(), uneven=True)
    found = []
    for _ in range(2):
        for batch in batches.micro_batches(mine, plan.batch, batches.NO_DENOMINATORS, world, pad_id=0, device=cpu):
            logprobs, _entropy = held.logprobs(batch, 0.8)
            assert not logprobs.requires_grad
            found.append(logprobs)
        held.sleep()
    parts = max(parameter.numel() for parameter in policy.parameters())
    return {"logprobs": found, "whole": parts > 0}
