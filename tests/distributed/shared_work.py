"""Updates in which the completions of a group share their prompt. As `work.py`, whose helpers it uses."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import work

CPU = torch.device("cpu")


def grouped(items: list[Any]) -> list[Any]:
    """The same completions in groups of three, each behind its group's prompt."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for draw in range(len(items) // 3):
        prompt = torch.randint(0, 97, (1 + 4 * draw,), generator=generator)
        sample = SimpleNamespace(completion=SimpleNamespace(prompt=SimpleNamespace(draw=draw)))
        for item in items[3 * draw : 3 * draw + 3]:
            ids = torch.cat([prompt, item.token_ids[item.prompt_tokens :]])
            found.append(replace(item, sample=sample, token_ids=ids, prompt_tokens=len(prompt)))
    return found


def planned(*, layout: str, shares: bool, micro: int = 3, tokens: int | None = None) -> Any:
    plan = work.plan_of(layout, micro, "token_mean", kl=0.1, tokens=tokens)
    plan.batch = replace(plan.batch, share_prompts=shares)
    return plan


def mine(world: Any, items: list[Any]) -> list[Any]:
    """Whole groups: three on rank 0, one on rank 1."""
    return work.share(world, grouped(items), uneven=True)


def gradient(world: Any, *, zero: int, attention: str = "sdpa", experts: bool = False, **how: Any) -> Any:
    from rftcli.models.policy import CausalPolicy
    from rftcli.runtime.learner import DeepSpeedLearner
    from rftcli.stages.learn import one_update, policy_loss

    learner = work.learner_of(world, zero=zero)
    if experts:
        learner = DeepSpeedLearner(CausalPolicy(work.tiny_experts()), learner.plan, world, CPU, temperature=0.8)
    learner.module.model.config._attn_implementation = attention
    plan, updates = planned(**how), []
    found = work.full_gradients(
        learner,
        lambda: updates.append(one_update(mine(world, work.experiences()), learner, policy_loss(plan.loss, 20), plan, world, pad_id=0, device=CPU)),
    )
    return {"gradient": found, "metrics": dict(updates[0].metrics), "norm": updates[0].grad_norm, "tokens": updates[0].tokens}


def critic(world: Any, *, zero: int, **how: Any) -> Any:
    """Values, those behind the last tokens too, and the gradient of an update that learns them."""
    from rftcli.stages import batches
    from rftcli.stages.values import critic_update, fill_values, with_ends

    learner = work.tiny_critic(world, zero=zero)
    plan, updates = planned(**how), []
    plan.critic = SimpleNamespace(value_clip=0.2)
    fresh = mine(world, work.experiences())
    fill_values(fresh, learner, plan, world, pad_id=0, device=CPU)
    ends: list[float] = []
    for batch in batches.micro_batches(fresh, plan.batch, batches.NO_DENOMINATORS, world, pad_id=0, device=CPU):
        members = fresh[len(ends) : len(ends) + batch.num_sequences]
        with torch.no_grad():
            ends += learner.values(with_ends(batch, members))[batch.target_ids.numel() :].tolist()
    known = mine(world, work.with_values())
    found = work.full_gradients(learner, lambda: updates.append(critic_update(known, learner, plan, world, pad_id=0, device=CPU)))
    values = [value for item in fresh for value in item.values.tolist()]
    one = updates[0]
    return {"gradient": found, "metrics": dict(one.metrics), "norm": one.grad_norm, "tokens": one.tokens, "values": values + ends}


def before(world: Any, *, zero: int, **how: Any) -> Any:
    """Log-probs without a gradient, as old ones and those of a reference are found."""
    from rftcli.stages.credit import _fill

    learner, plan = work.learner_of(world, zero=zero), planned(**how)
    plan.rollout.temperature, plan.loss = 0.8, SimpleNamespace(top_entropy_share=0.5)
    items = mine(world, work.experiences())
    _fill(items, learner, "old_logprobs", plan, world, pad_id=0, device=CPU)
    return [(item.old_logprobs.tolist(), item.entropies.tolist()) for item in items]
