"""What happens beside the updates: evaluation, trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.compile_data import reward_plan
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts
from rftcli.plan.plan import (
    EarlyStopPlan,
    EvalPlan,
    EvalSampling,
    LaunchPlan,
    ProfilePlan,
    RewardPlan,
    SamplesPlan,
    TrackPlan,
)
from rftcli.plan.specs import scoring

if TYPE_CHECKING:
    from rftcli.recipe.sections import EvalSource, Recipe


def eval_plan(recipe: Recipe, facts: Facts, search_path: str, problems: list[PlanProblem]) -> EvalPlan:
    section = recipe.eval
    by_pass = section.every == "pass"
    if by_pass and not facts.train_rows:
        problems.append(PlanProblem(path="eval.every", message="the training rows have not been counted", hint="set a number of steps"))
    return EvalPlan(
        before_training=section.before_training,
        every=0 if section.every == "pass" else section.every,
        every_draws=(facts.train_rows or 0) if by_pass else 0,
        at_end=section.at_end,
        temperature=section.temperature,
        max_new_tokens=section.max_new_tokens or recipe.rollout.max_new_tokens,
        pass_k=tuple(section.pass_k),
        vote_k=tuple(section.vote_k),
        sampling={name: _sampling(recipe, source) for name, source in recipe.data.eval.items()},
        rewards=eval_rewards(recipe, search_path),
        weights=section.weights,
    )


def eval_rewards(recipe: Recipe, search_path: str) -> RewardPlan | None:
    """`eval.rewards`, compiled as `rewards` is; None where evaluation has none of its own."""
    if recipe.eval.rewards is None:
        return None
    return reward_plan(scoring(recipe), search_path)


def _sampling(recipe: Recipe, source: EvalSource) -> EvalSampling:
    """What the set says, else what `eval` says, else what the rollout does."""
    own, shared, rollout = source.sampling, recipe.eval, recipe.rollout
    longest = own.max_new_tokens or shared.max_new_tokens or rollout.max_new_tokens
    return EvalSampling(
        temperature=shared.temperature if own.temperature is None else own.temperature,
        top_p=rollout.top_p if own.top_p is None else own.top_p,
        top_k=rollout.top_k if own.top_k is None else own.top_k,
        min_p=rollout.min_p if own.min_p is None else own.min_p,
        max_new_tokens=longest,
        min_new_tokens=min(rollout.min_new_tokens, longest) if own.min_new_tokens is None else own.min_new_tokens,
    )


def early_stop_plan(recipe: Recipe) -> EarlyStopPlan | None:
    section = recipe.train.early_stop
    if section is None:
        return None
    return EarlyStopPlan(metric=section.metric, patience=section.patience, mode=section.mode, min_delta=section.min_delta)


def samples_plan(recipe: Recipe) -> SamplesPlan:
    return SamplesPlan(every=recipe.samples.every, max=recipe.samples.max)


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


def check_profile(recipe: Recipe, device: str, problems: list[PlanProblem]) -> None:
    if recipe.profile.tool == "memory" and device == "cpu":
        why = "torch keeps a history of allocations on CUDA alone"
        problems.append(PlanProblem(path="profile.tool", message="`memory` needs a GPU, and this run is on a CPU", reason=why, hint="use torch"))


def profile_plan(recipe: Recipe) -> ProfilePlan:
    section = recipe.profile
    return ProfilePlan(steps=tuple(sorted(set(section.steps))), tool=section.tool, ranks=section.ranks)
