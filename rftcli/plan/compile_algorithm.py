"""The mathematics of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rftcli.plan.compile_ppo import reads_token_rewards
from rftcli.plan.plan import (
    AdvantagePlan,
    LossPlan,
)

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe



def advantage_plan(recipe: Recipe) -> AdvantagePlan:
    section = recipe.algorithm.advantage
    options: Mapping[str, Any] = {"normalise_std": section.normalise_std, "std": section.std} if section.kind == "grpo" else {}
    per_token = reads_token_rewards(recipe)
    if per_token:
        options = {"gamma": section.gamma, **({"lam": section.lam} if section.kind == "gae" else {})}
    return AdvantagePlan(kind=section.kind, options=options, per_token=per_token, whiten=section.whiten, clip=section.clip)


def loss_plan(recipe: Recipe) -> LossPlan:
    loss, kl = recipe.algorithm.loss, recipe.algorithm.kl
    return LossPlan(
        kind=loss.kind,
        options={"clip_low": loss.clip_low, "clip_high": loss.clip_high, "dual_clip": loss.dual_clip},
        aggregate=loss.aggregate,
        kl_coefficient=kl.coefficient if kl.place == "loss" else 0.0,
        kl_estimator=kl.estimator,
        router_coefficient=recipe.models.policy.router_loss,
    )
