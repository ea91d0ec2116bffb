"""What happens beside the updates: evaluation, trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.plan import (
    EvalPlan,
    LaunchPlan,
    ProfilePlan,
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
    )


def track_plan(recipe: Recipe, folder: str) -> TrackPlan:
    tensorboard = recipe.track.tensorboard
    if tensorboard is True:
        tensorboard = "tensorboard"  # inside the run directory
    wandb, own = recipe.track.wandb, recipe.track.python
    return TrackPlan(
        tensorboard=tensorboard or None,
        wandb=None if wandb is None else wandb.model_dump(mode="json"),
        python=None if own is None else {"target": own, "folder": folder},
    )


def launch_plan(recipe: Recipe) -> LaunchPlan:
    return LaunchPlan(env=dict(recipe.launch.env), timeout_minutes=recipe.launch.timeout_minutes)


def profile_plan(recipe: Recipe) -> ProfilePlan:
    section = recipe.profile
    return ProfilePlan(steps=tuple(sorted(set(section.steps))), tool=section.tool, ranks=section.ranks)
