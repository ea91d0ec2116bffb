"""How completions become updates: batch, micro-batches, optimizer, run length."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from rftcli.algo import batchmath
from rftcli.plan import deepspeed_config
from rftcli.plan.compile_models import PACKING, trains_in
from rftcli.plan.compile_passing import attention_cost, balances, pass_cost, skips_zero_advantage
from rftcli.plan.compile_precision import update_notes
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts
from rftcli.plan.plan import (
    BatchPlan,
    LearnerPlan,
    ModelPlan,
    WorldPlan,
)

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

def batch_plan(recipe: Recipe, facts: Facts, world: WorldPlan, attention: str, problems: list[PlanProblem]) -> BatchPlan | None:
    section = recipe.batch
    samples = recipe.rollout.samples_per_prompt
    refusal = batchmath.refusal(section.prompts_per_step, section.updates_per_step, facts.ranks)
    if refusal is not None:
        problems.append(PlanProblem(path="batch.prompts_per_step", message=refusal, hint="`rft explain batch.prompts_per_step`"))
        return None
    refusal = batchmath.rollouts_refusal(section.prompts_per_step, section.updates_per_step, section.rollouts_per_update, facts.ranks)
    if refusal is not None:
        problems.append(PlanProblem(path="batch.rollouts_per_update", message=refusal, hint="`rft explain batch.rollouts_per_update`"))
        return None
    rows = section.prompts_per_step // section.updates_per_step // facts.ranks * samples
    budget = None
    if section.micro_batch_size == "auto":
        assert section.tokens_per_micro_batch != "auto", "`with_memory` has put a number there"
        budget = section.tokens_per_micro_batch
        longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
        most = max(1, min(rows, budget // longest))
        micro = math.ceil(rows / math.ceil(rows / most))  # no more micro-batches than needed, as even as one size allows
    else:
        micro = min(section.micro_batch_size, rows)
    shape = batchmath.batch_shape(
        prompts_per_step=section.prompts_per_step,
        samples_per_prompt=samples,
        updates_per_step=section.updates_per_step,
        epochs=section.epochs,
        ranks=facts.ranks,
        micro_batch_size=micro,
        rollouts_per_update=section.rollouts_per_update,
        tokens_per_micro_batch=budget,
        share_prompts=section.share_prompts is True,
    )
    layout = section.layout if section.layout != "auto" else "packed" if attention in PACKING else "padded"
    return BatchPlan(
        prompts_per_step=section.prompts_per_step,
        samples_per_prompt=samples,
        updates_per_step=section.updates_per_step,
        epochs=section.epochs,
        micro_batch_size=micro,
        layout=layout,
        equation=batchmath.equation(shape),
        needs_prepass=needs_prepass(recipe),
        tokens_per_micro_batch=budget,
        rollouts_per_update=section.rollouts_per_update,
        share_prompts=shape.share_prompts,
        balance=balances(recipe),
        attention_cost=attention_cost(facts.model),
        pass_cost=pass_cost(facts.model, world.device, layout, budget, shares=shape.share_prompts),
        skip_zero_advantage=skips_zero_advantage(recipe),
    )


def needs_prepass(recipe: Recipe) -> str | None:
    """Why the log-probs at rollout time have to be computed apart; None: those of the only update's own forward pass are the same numbers, or the
    sampler's stand in their place."""
    loss = recipe.algorithm.loss
    if loss.top_entropy_share < 1.0:
        return "the share of tokens with the highest entropy is taken over a whole update before it"
    if loss.old == "sampler":
        return None
    if loss.correction is not None:
        return "the correction compares the sampler's log-probs with those at rollout time"
    if loss.kind in ("clip_cov", "kl_cov"):
        return f"`{loss.kind}` chooses tokens over a whole update before it"
    if loss.old == "recompute":
        return "the recipe asks for it"
    if recipe.batch.updates_per_step * recipe.batch.epochs > 1:
        return "several updates use one rollout"
    if recipe.algorithm.kl.coefficient and recipe.algorithm.kl.place == "reward":
        return "the KL term in the reward reads the log-probs at rollout time"
    if recipe.models.teacher is not None:
        return "the teacher's log-probs are compared with those at rollout time"
    if recipe.models.policy.dropout > 0:
        return "dropout changes the log-probs of the update's own forward pass"
    if recipe.models.policy.lora is not None and recipe.models.policy.lora.dropout > 0:
        return "the adapter's dropout changes the log-probs of the update's own forward pass"
    return None


def learner_plan(
    recipe: Recipe, world: WorldPlan, policy: ModelPlan, batch: BatchPlan | None, notes: list[str]
) -> LearnerPlan | None:
    if batch is None:
        return None
    optimizer = recipe.train.optimizer
    stage = recipe.train.deepspeed.zero_stage
    assert stage != "auto", "`with_memory` has put a number there"
    notes.extend(update_notes(recipe, world))
    return LearnerPlan(
        kind=optimizer.kind,
        lr=optimizer.lr,
        betas=(optimizer.betas[0], optimizer.betas[1]),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        schedule=optimizer.schedule,
        warmup_updates=optimizer.warmup_steps * batch.optimizer_updates_per_step,
        min_lr=optimizer.min_lr,
        schedule_updates=0,
        max_grad_norm=recipe.train.max_grad_norm,
        skip_at_most=recipe.train.nonfinite.skip_at_most,
        zero_stage=stage,
        deepspeed=deepspeed_config.build(
            stage=stage,
            dtype=trains_in(policy),
            ranks=world.ranks,
            max_grad_norm=recipe.train.max_grad_norm,
            **recipe.train.precision.model_dump(),
            offload_optimizer=recipe.train.offload.optimizer,
            offload_parameters=recipe.train.offload.parameters,
            extra=recipe.train.deepspeed.extra,
        ),
        options=dict(optimizer.options),
        no_decay=tuple(optimizer.no_decay),
        compile=recipe.train.compile,
    )


def with_horizon(learner: LearnerPlan, recipe: Recipe, steps: int, batch: BatchPlan) -> LearnerPlan:
    horizon = recipe.train.optimizer.schedule_steps or max(1, steps - recipe.train.freeze_policy_steps)
    return replace(learner, schedule_updates=horizon * batch.optimizer_updates_per_step)


def check_stage(recipe: Recipe, policy: ModelPlan, problems: list[PlanProblem]) -> None:
    if recipe.train.deepspeed.zero_stage == 0 and trains_in(policy) == "bfloat16":
        problems.append(
            PlanProblem(
                path="train.deepspeed.zero_stage",
                message="must be at least 1 for a policy in bfloat16",
                reason="float32 master weights and gradients are kept from there on",
                hint="or train in float32: `models.policy.dtype: float32`",
            )
        )


def steps_of(recipe: Recipe, facts: Facts, problems: list[PlanProblem]) -> int:
    if recipe.train.steps is not None:
        return recipe.train.steps
    assert recipe.train.data_passes is not None
    if facts.train_rows is None:
        problems.append(PlanProblem(path="train.data_passes", message="the training rows have not been counted", hint="set train.steps"))
        return 0
    passes = Fraction(str(recipe.train.data_passes))  # the decimal that was written: 0.07 x 100 rows are 7 draws, not 7.000000000000001
    return max(1, math.ceil(passes * facts.train_rows / recipe.batch.prompts_per_step))
