"""What happens beside the updates: evaluation, trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.plan import (
    EvalPlan,
    TrackPlan,
)

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe



def eval_plan(recipe: Recipe) -> EvalPlan:
    section = recipe.eval
    return EvalPlan(
        before_training=section.before_training,
        every=section.every,
        at_end=section.at_end,
        temperature=section.temperature,
        max_new_tokens=section.max_new_tokens or recipe.rollout.max_new_tokens,
        pass_k=tuple(section.pass_k),
        weights=section.weights,
    )


def track_plan(recipe: Recipe) -> TrackPlan:
    tensorboard = recipe.track.tensorboard
    if tensorboard is True:
        tensorboard = "tensorboard"  # inside the run directory
    wandb = recipe.track.wandb
    return TrackPlan(tensorboard=tensorboard or None, wandb=None if wandb is None else wandb.model_dump(mode="json"))
