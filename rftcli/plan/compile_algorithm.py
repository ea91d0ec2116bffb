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
    added = recipe.models.teacher is not None and section.kind != "distill"
    return AdvantagePlan(
        kind=section.kind,
        options=_options(recipe),
        per_token=reads_token_rewards(recipe),
        whiten=section.whiten,
        clip=section.clip,
        bootstrap_truncated=section.bootstrap_truncated,
        teacher_coefficient=section.distill_coefficient if added else None,
        python=section.python,
    )


def _options(recipe: Recipe) -> Mapping[str, Any]:
    """Arguments of the estimator; what is off is absent where the function has it as its default."""
    section = recipe.algorithm.advantage
    least = {"min_std": section.min_std} if section.min_std else {}
    gamma = {"gamma": section.gamma} if reads_token_rewards(recipe) else {}
    found: dict[str, Mapping[str, Any]] = {
        "grpo": {"normalise_std": section.normalise_std, "std": section.std, **least},
        "reinforce": {**({"baseline": section.baseline} if section.baseline != "none" else {}), **gamma},
        "grpo_passk": {"normalise_std": section.passk_std, **least},
        "gdpo": least,
        "gae": {**gamma, "lam": section.lam},
        "distill": {"coefficient": section.distill_coefficient},
        "python": dict(section.options),
    }
    return found.get(section.kind, {})


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
    advantage = advantage_plan(recipe)
    if loss.kind in ONE_TERM and (advantage.per_token or advantage.teacher_coefficient is not None):
        whose = f"`{advantage.kind}`" if advantage.per_token else "`models.teacher`"
        problems.append(
            PlanProblem(
                path="algorithm.loss.kind",
                message=f"`{loss.kind}` has one term an answer, and {whose} an advantage for each token",
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
