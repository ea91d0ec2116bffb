"""How completions are sampled, and whether they fit into the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan import memory
from rftcli.plan.compile_models import trained_parameters
from rftcli.plan.compile_packing import lengths_vary
from rftcli.plan.compile_precision import keeping
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.compile_sampling import strategies, strategy_notes
from rftcli.plan.facts import Facts
from rftcli.plan.plan import (
    LearnerPlan,
    ModelPlan,
    RolloutPlan,
    WorldPlan,
)

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe
    from rftcli.recipe.sections.rollout import Rollout

MAX_BATCH_ROWS = 64
"""Rows of an hf decode pass; more makes every step wait for the longest answer of more groups."""
MOST_ROWS, MOST_POSITIONS = 256, 16_384
"""The same where finished rows leave a pass: rows, and positions of their cache where that is more than MAX_BATCH_ROWS."""
ROW_MULTIPLE = 8
"""Vector kernels treat the last few numbers of an oddly sized tensor apart, with other last bits."""


def rollout_plan(recipe: Recipe, learner: LearnerPlan | None, notes: list[str]) -> RolloutPlan | None:
    if learner is None:
        return None
    section = recipe.rollout
    assert section.max_new_tokens != "auto", "`with_length` has put a number there"
    plan = RolloutPlan(
        engine="hf" if section.engine == "auto" else section.engine,
        shares_weights=learner.zero_stage < 3,
        batch_rows=batch_rows_of(recipe),
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
        lengths_vary=lengths_vary(recipe),
        most_rows=most_rows_of(recipe),
        batch_tokens=section.hf.batch_tokens,
        continuous=section.hf.continuous,
        repetition_penalty=section.penalties.repetition,
        presence_penalty=section.penalties.presence,
        frequency_penalty=section.penalties.frequency,
        logit_bias=dict(section.logit_bias),
        bad_words=tuple(section.bad_words),
        structured=None if section.structured is None else section.structured.model_dump(exclude_none=True),
        options=section.hf.options.model_dump(exclude_defaults=True, mode="json"),
        **strategies(section),
        greedy_twin=recipe.algorithm.advantage.kind == "remax",
    )
    notes.extend(strategy_notes(recipe))
    if plan.reshaped_by:
        notes.append(
            f"rollout.{', rollout.'.join(plan.reshaped_by)}: completions come from another distribution than the one that is trained, the model's at "
            "the temperature; the update is off-policy by that much, nothing corrects for it, and the engine's log-probs are not compared with the "
            "trainer's"
        )
    return plan


def batch_rows_of(recipe: Recipe) -> int:
    """Rows of a decode pass that are fixed, or the most of them where `batch_tokens` limits them. From the recipe alone, never from
    the rank count: the promise of equal bits on any number of ranks rests on it."""
    rows = recipe.rollout.hf.batch_rows
    if rows != "auto":
        return rows
    samples = recipe.rollout.samples_per_prompt
    step_rows = recipe.batch.prompts_per_step * samples
    if recipe.rollout.hf.batch_tokens is None:
        groups = max(1, min(MAX_BATCH_ROWS, step_rows // 2) // samples)
        step_rows = groups * samples
    return -(-step_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def most_rows_of(recipe: Recipe) -> int:
    """Rows of a decode pass that holds those that are there: a whole step's on one rank, if they are not too many."""
    if recipe.rollout.hf.batch_rows != "auto":
        return recipe.rollout.hf.batch_rows
    rollout = recipe.rollout
    step_rows = recipe.batch.prompts_per_step * rollout.samples_per_prompt
    fitting = MOST_POSITIONS // (int(rollout.max_prompt_tokens) + int(rollout.max_new_tokens)) // ROW_MULTIPLE * ROW_MULTIPLE
    most = min(MOST_ROWS, max(MAX_BATCH_ROWS, fitting))
    return max(batch_rows_of(recipe), -(-min(most, step_rows) // ROW_MULTIPLE) * ROW_MULTIPLE)


def filters_of(section: Rollout) -> list[str]:
    """Those of `memory.CHOICE_BYTES` that any completion of training is sampled with."""
    labels = list(section.by_label.values())
    on = {
        "top_k": section.top_k > 0 or any(label.top_k for label in labels),
        "top_p": section.top_p < 1 or any((label.top_p or 1) < 1 for label in labels),
        "min_p": section.min_p > 0 or any(label.min_p for label in labels),
        "options": section.hf.options != type(section.hf.options)(),
    }
    return [name for name, is_on in on.items() if is_on]


def check_replica(
    rollout: RolloutPlan, recipe: Recipe, policy: ModelPlan, world: WorldPlan, facts: Facts, problems: list[PlanProblem], notes: list[str]
) -> None:
    """Under ZeRO-3 the hf engine gathers the weights once a rollout into a replica of its own; refuse a plan whose ranks cannot hold it."""
    if rollout.engine != "hf" or rollout.shares_weights:
        return
    if policy.parameters is None:
        notes.append("ZeRO stage 3: the engine keeps a whole replica of the weights on every rank; the model's size is not known before it is loaded")
        return
    need, budget, text = memory.with_replica(
        policy.parameters, policy.dtype, world, facts.machine, keeping(recipe), trained=trained_parameters(policy, facts.model)
    )
    if need <= budget:
        notes.append(f"ZeRO stage 3: the engine keeps a replica, refilled once after every update: {text}")
        return
    ways = [
        *(["`train.offload.optimizer: cpu`"] if world.device == "cuda" and recipe.train.offload.optimizer == "none" else []),
        *(["`models.policy.lora: {}`"] if policy.lora is None else []),
        "a smaller model, or more memory",
    ]
    problems.append(
        PlanProblem(
            path="train.deepspeed.zero_stage",
            message=f"the engine `hf` does not fit beside ZeRO stage 3: {text}",
            reason="it gathers all weights into a replica on every rank; gathering them layer by layer for every token would take hours",
            hint=f"{', '.join(ways)}; more ranks shrink the training state and not the replica",
        )
    )
