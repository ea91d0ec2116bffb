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
    added = recipe.models.teacher is not None and section.kind != "distill"
    return AdvantagePlan(
        kind=section.kind,
        options=_options(recipe),
        per_token=reads_token_rewards(recipe),
        whiten=section.whiten,
        clip=section.clip,
        bootstrap_truncated=section.bootstrap_truncated,
        teacher_coefficient=section.distill_coefficient if added else None,
        python=section.python,
    )


def _options(recipe: Recipe) -> Mapping[str, Any]:
    """Arguments of the estimator; what is off is absent where the function has it as its default."""
    section = recipe.algorithm.advantage
    least = {"min_std": section.min_std} if section.min_std else {}
    gamma = {"gamma": section.gamma} if reads_token_rewards(recipe) else {}
    found: dict[str, Mapping[str, Any]] = {
        "grpo": {"normalise_std": section.normalise_std, "std": section.std, **least},
        "reinforce": {**({"baseline": section.baseline} if section.baseline != "none" else {}), **gamma},
        "grpo_passk": {"normalise_std": section.passk_std, **least},
        "gdpo": least,
        "gae": {**gamma, "lam": section.lam},
        "distill": {"coefficient": section.distill_coefficient},
        "python": dict(section.options),
    }
    return found.get(section.kind, {})


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
