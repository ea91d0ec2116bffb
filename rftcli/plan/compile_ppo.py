"""The critic, the KL term, the supervised stream and the router's loss of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rftcli.plan.compile_models import trains_in
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts, ModelFacts
from rftcli.plan.plan import BatchPlan, CriticPlan, KlPlan, LearnerPlan, ModelPlan, SupervisedPlan
from rftcli.plan.specs import supervised_data

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

UNBIASED_IN_REWARD = frozenset({"k1"})
"""Estimators of the KL whose mean, taken from the reward, has the gradient of the KL."""


def kl_level(recipe: Recipe) -> str:
    kl = recipe.algorithm.kl
    if kl.level != "auto":
        return kl.level
    return "token" if recipe.algorithm.advantage.kind in ("gae", "reinforce", "reinforce_pp") else "sequence"


def reads_token_rewards(recipe: Recipe) -> bool:
    """Whether advantages come from rewards per token: with reinforce where they are discounted or hold a KL term for each token; always with the
    estimators that have one value a token."""
    advantage, kl = recipe.algorithm.advantage, recipe.algorithm.kl
    kl_by_token = kl.coefficient > 0 and kl.place == "reward" and kl_level(recipe) == "token"
    return advantage.kind in ("gae", "reinforce_pp", "distill") or (advantage.kind == "reinforce" and (advantage.gamma != 1.0 or kl_by_token))


def kl_plan(recipe: Recipe, notes: list[str]) -> KlPlan | None:
    kl = recipe.algorithm.kl
    if kl.coefficient == 0.0:
        return None
    if kl.place == "reward" and kl.estimator not in UNBIASED_IN_REWARD:
        notes.append(f"algorithm.kl.estimator: {kl.estimator} in the reward pulls in a biased direction; k1 is the unbiased estimate there")
    return KlPlan(
        coefficient=kl.coefficient,
        estimator=kl.estimator,
        place=kl.place,
        level=kl_level(recipe),
        controller=kl.controller.kind,
        target=kl.controller.target,
        horizon=kl.controller.horizon,
    )


def critic_plan(
    recipe: Recipe, policy: ModelPlan, learner: LearnerPlan, batch: BatchPlan, steps: int, own: ModelFacts | None
) -> CriticPlan | None:
    """The critic beside a finished policy learner, whose ZeRO stage and other engine settings it shares. `own`: facts of a model of its own."""
    section = recipe.models.critic
    if section is None:
        return None
    # what makes the policy trainable is not the critic's: it is trained whole, in the number type of the settings that it shares
    model = replace(policy, dtype=trains_in(policy), dropout=0.0, freeze=(), lora=None, quantise=None, ema=None)
    if own is not None:
        model = replace(model, path=own.path, given=section.from_, parameters=own.parameters, revision=own.revision, options={})
    optimizer = section.optimizer
    updates = batch.optimizer_updates_per_step
    return CriticPlan(
        model=model,
        head=section.head,
        value_clip=section.value_clip,
        learner=replace(
            learner,
            kind=optimizer.kind,
            options=dict(optimizer.options),
            no_decay=tuple(optimizer.no_decay),
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            schedule=optimizer.schedule,
            warmup_updates=(section.warmup_steps or optimizer.warmup_steps) * updates,
            min_lr=optimizer.min_lr,
            schedule_updates=(optimizer.schedule_steps or steps) * updates,
            max_grad_norm=section.max_grad_norm,
            deepspeed={**learner.deepspeed, "gradient_clipping": section.max_grad_norm or 0.0},
        ),
    )


def all_parameters(recipe: Recipe, policy: ModelFacts, critic: ModelFacts | None) -> int | None:
    """Parameters of policy and critic together, frozen ones too; None if one is not known."""
    if recipe.models.critic is None or policy.parameters is None:
        return policy.parameters
    beside = policy.parameters if critic is None else critic.parameters
    return None if beside is None else policy.parameters + beside


def supervised_plan(recipe: Recipe, batch: BatchPlan) -> SupervisedPlan | None:
    section = recipe.train.supervised
    if section is None:
        return None
    rows = batch.prompts_per_step // batch.updates_per_step if section.rows_per_update == "auto" else section.rows_per_update
    spec = supervised_data(recipe)
    assert spec is not None
    return SupervisedPlan(data=spec, coefficient=section.coefficient, rows_per_update=rows, max_answer_tokens=recipe.rollout.max_new_tokens)


def check_router(recipe: Recipe, facts: Facts, problems: list[PlanProblem]) -> None:
    if recipe.models.policy.router_loss > 0 and facts.model.experts is None:
        problems.append(
            PlanProblem(
                path="models.policy.router_loss",
                message="the model has no router",
                reason="its configuration names no experts, so there is nothing to balance",
                hint="leave the key out",
            )
        )
