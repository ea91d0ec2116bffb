"""How parts are combined and rewards are shaped, from a recipe. Parts themselves are in `compile_data`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.plan_rewards import ShapingPlan
from rftcli.rewards.spec import PLAIN_SUM, CombineSpec

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def combine_specs(recipe: Recipe) -> dict[str, CombineSpec]:
    """Label -> how its parts become a reward; labels with a plain sum are left out."""
    found = {label: _combine(entry) for label, entry in recipe.rewards.items()}
    return {label: spec for label, spec in found.items() if spec != PLAIN_SUM}


def _combine(entry: Any) -> CombineSpec:
    if isinstance(entry.combine, str):
        return CombineSpec(how=entry.combine, renormalise=entry.renormalise)
    return CombineSpec(how="python", target=entry.combine.python, options=dict(entry.combine.options))


def shaping_plan(recipe: Recipe) -> ShapingPlan:
    section = recipe.reward_shaping
    longest = recipe.rollout.max_new_tokens
    assert longest != "auto", "lengths are resolved before"
    overlong = section.overlong
    return ShapingPlan(
        truncated=section.truncated,
        truncated_factor=section.truncated_factor,
        missing_eos_penalty=section.missing_eos_penalty,
        overlong_buffer=None if overlong is None else overlong_buffer(overlong.buffer, min([longest, *_limits(recipe).values()])),
        overlong_factor=1.0 if overlong is None else overlong.factor,
        max_new_tokens=0 if overlong is None else longest,
        limits={} if overlong is None else _limits(recipe),
        running_norm=section.running_norm,
        clip=section.clip,
    )


def overlong_buffer(buffer: int | Literal["auto"], shortest: int) -> int:
    """Tokens of the buffer; `auto` has the proportion of DAPO, 4096 of 20480.

    >>> overlong_buffer("auto", 20480), overlong_buffer("auto", 3), overlong_buffer(8, 24)
    (4096, 1, 8)
    """
    return max(1, shortest // 5) if buffer == "auto" else buffer


def _limits(recipe: Recipe) -> dict[str, int]:
    return {label: own.max_new_tokens for label, own in recipe.rollout.by_label.items() if own.max_new_tokens is not None}


def check_overlong(recipe: Recipe, problems: list[PlanProblem]) -> None:
    """A buffer that begins before the first token. Lengths may be `auto` in the recipe, so it is looked at here."""
    overlong, longest = recipe.reward_shaping.overlong, recipe.rollout.max_new_tokens
    if longest == "auto" or overlong is None or overlong.buffer == "auto":
        return
    shortest = min([longest, *_limits(recipe).values()])
    if overlong.buffer > shortest:
        message = f"must be at most `max_new_tokens` of every label, got {overlong.buffer} above {shortest}"
        problems.append(PlanProblem(path="reward_shaping.overlong.buffer", message=message, reason="every answer would be overlong"))
