"""Data sets and rewards of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.data.spec import ChatSpec
from rftcli.plan.compile_rewards import combine_specs
from rftcli.plan.compile_sampling import curriculum_plan
from rftcli.plan.plan import (
    DataPlan,
    RewardPlan,
)
from rftcli.plan.specs import data_specs, reward_parts

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe



def data_plan(recipe: Recipe) -> DataPlan:
    chat = recipe.models.policy.chat
    train, evals = data_specs(recipe)
    return DataPlan(
        train=train,
        eval=evals,
        seed=recipe.seed if recipe.data.seed is None else recipe.data.seed,
        shuffle=recipe.data.shuffle,
        check_reference=recipe.data.check_reference,
        overlong_prompt=recipe.data.overlong_prompt,
        max_prompt_tokens=recipe.rollout.max_prompt_tokens,
        curriculum=curriculum_plan(recipe.data.curriculum),
        chat=ChatSpec(template=chat.template, options=dict(chat.options), system=chat.system, prefill=chat.prefill, score_prefill=chat.score_prefill),
    )


def reward_plan(recipe: Recipe, search_path: str) -> RewardPlan:
    return RewardPlan(
        labels=reward_parts(recipe),
        max_error_rate=recipe.reward_shaping.max_error_rate,
        score_prefill=recipe.models.policy.chat.score_prefill,
        search_path=search_path,
        combine=combine_specs(recipe),
    )
