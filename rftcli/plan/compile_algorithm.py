"""The mathematics of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rftcli.plan.compile_ppo import reads_token_rewards
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.compile_update import needs_prepass
from rftcli.plan.plan import (
    AdvantagePlan,
    LossPlan,
    RolloutPlan,
)
from rftcli.plan.plan_loss import CorrectionPlan, EntropyPlan, RejectPlan
from rftcli.recipe.sections.loss import LOSS_OPTIONS, NAMED_OPTIONS, ONE_TERM

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe
    from rftcli.recipe.sections.loss import Correction


def advantage_plan(recipe: Recipe) -> AdvantagePlan:
    section = recipe.algorithm.advantage
    options: Mapping[str, Any] = {"normalise_std": section.normalise_std, "std": section.std} if section.kind == "grpo" else {}
    per_token = reads_token_rewards(recipe)
    if per_token:
        options = {"gamma": section.gamma, **({"lam": section.lam} if section.kind == "gae" else {})}
    return AdvantagePlan(kind=section.kind, options=options, per_token=per_token, whiten=section.whiten, clip=section.clip)


def loss_plan(recipe: Recipe) -> LossPlan:
    loss, kl = recipe.algorithm.loss, recipe.algorithm.kl
    controller = loss.entropy_controller
    return LossPlan(
        kind=loss.kind,
        options=_loss_options(recipe),
        python=loss.python,
        aggregate=loss.aggregate,
        old=loss.old,
        correction=None if loss.correction is None else _correction_plan(loss.correction),
        off_policy_mask=loss.off_policy_mask,
        entropy_coefficient=loss.entropy_coefficient,
        entropy_controller=None if controller is None else EntropyPlan(**controller.model_dump()),
        top_entropy_share=loss.top_entropy_share,
        kl_coefficient=kl.coefficient if kl.place == "loss" else 0.0,
        kl_estimator=kl.estimator,
        kl_gradient="unbiased" if kl.unbiased_gradient else "ratio_weighted" if kl.ratio_weighted else "own",
        router_coefficient=recipe.models.policy.router_loss,
    )


def _loss_options(recipe: Recipe) -> dict[str, Any]:
    """What the loss reads: its bounds, and its own options with their defaults."""
    loss = recipe.algorithm.loss
    named = {name: getattr(loss, name) for name in NAMED_OPTIONS[loss.kind]}
    return {**named, **LOSS_OPTIONS[loss.kind], **loss.options}


def _correction_plan(section: Correction) -> CorrectionPlan:
    reject = section.reject
    return CorrectionPlan(
        kind=section.kind,
        level=section.level,
        cap=section.cap,
        band=section.band,
        gate=section.gate,
        bound=section.bound,
        batch_normalise=section.batch_normalise,
        reject=None if reject is None else RejectPlan(by=reject.by, band=reject.band, bound=reject.bound),
    )


def check_loss(recipe: Recipe, rollout: RolloutPlan | None, problems: list[PlanProblem], notes: list[str]) -> None:
    """What a loss needs of advantages, updates and sampling."""
    loss = recipe.algorithm.loss
    if loss.kind in ONE_TERM and advantage_plan(recipe).per_token:
        problems.append(
            PlanProblem(
                path="algorithm.loss.kind",
                message=f"`{loss.kind}` has one term an answer, and `{recipe.algorithm.advantage.kind}` an advantage for each token",
                hint="use a loss with a term a token, such as ppo_clip or gspo",
            )
        )
    why = needs_prepass(recipe)
    if loss.old == "current" and why is not None:
        problems.append(PlanProblem(path="algorithm.loss.old", message="`current` is not enough", reason=why, hint="use auto"))
    reshaped = () if rollout is None else rollout.reshaped_by
    if reshaped and (loss.correction is not None or loss.old == "sampler"):
        problems.append(
            PlanProblem(
                path="algorithm.loss.correction" if loss.correction is not None else "algorithm.loss.old",
                message=f"reads the sampler's log-probs, and `rollout.{reshaped[0]}` makes them those of another distribution",
                reason="the ratio would hold the kept mass besides the difference of the two programs",
            )
        )
    if loss.kind == "rloo_sequence":
        notes.append(
            "algorithm.loss.kind: rloo_sequence multiplies the ratios of an answer's tokens, so long answers leave the clip range after the smallest "
            "update; step.clip_low_fraction and clip_high_fraction say how many do"
        )
