"""How completions are sampled, and whether they fit into the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts
from rftcli.plan.plan import (
    LearnerPlan,
    RolloutPlan,
)

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

MAX_BATCH_ROWS = 64
"""Rows of an hf decode pass; more makes every step wait for the longest answer of more groups."""
ROW_MULTIPLE = 8
"""Vector kernels treat the last few numbers of an oddly sized tensor apart, with other last bits."""


def rollout_plan(recipe: Recipe, learner: LearnerPlan | None) -> RolloutPlan | None:
    if learner is None:
        return None
    section = recipe.rollout
    rows = section.hf.batch_rows
    if rows == "auto":
        # From the recipe alone, never from the rank count: the promise of equal bits on any number of ranks rests on it.
        step_rows = recipe.batch.prompts_per_step * section.samples_per_prompt
        groups = max(1, min(MAX_BATCH_ROWS, step_rows // 2) // section.samples_per_prompt)
        rows = -(-groups * section.samples_per_prompt // ROW_MULTIPLE) * ROW_MULTIPLE
    return RolloutPlan(
        engine="hf" if section.engine == "auto" else section.engine,
        shares_weights=learner.zero_stage < 3,
        batch_rows=rows,
        samples_per_prompt=section.samples_per_prompt,
        max_new_tokens=section.max_new_tokens,
        min_new_tokens=section.min_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        stop=tuple(section.stop),
        stop_token_ids=tuple(section.stop_token_ids),
        ignore_eos=section.ignore_eos,
    )


def check_lengths(recipe: Recipe, facts: Facts, problems: list[PlanProblem]) -> None:
    limit = facts.model.max_positions
    if limit is None:
        return
    prompt = recipe.rollout.max_prompt_tokens
    lengths = {"rollout.max_new_tokens": recipe.rollout.max_new_tokens}
    if recipe.data.eval and recipe.eval.max_new_tokens is not None:
        lengths["eval.max_new_tokens"] = recipe.eval.max_new_tokens
    for path, new in lengths.items():
        if prompt + new > limit:
            message = f"max_prompt_tokens {prompt} + max_new_tokens {new} = {prompt + new} positions, the model has {limit}"
            problems.append(PlanProblem(path=path, message=message, hint=f"max_prompt_tokens + max_new_tokens must be at most {limit}"))
