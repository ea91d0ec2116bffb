"""Which completions pass through the model in an update, and on which rank. What it leaves out: how they travel (`stages.spread`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import ModelFacts

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

MORE_THAN_ADVANTAGES = ("cpg", "dro", "kl_cov", "python")
"""Losses with a term, or one that may be there, that is no multiple of the advantage."""


def balances(recipe: Recipe) -> bool:
    """A micro-batch of so many rows costs what its longest row does, so work by rows is not shared out."""
    return recipe.batch.balance is not False and recipe.batch.micro_batch_size == "auto"


def attention_cost(model: ModelFacts) -> float:
    """Forward: 2 x parameters for a token, 2 x width x layers for a token and one before it, of which a token has half its row's
    (arXiv:2001.08361, table 1). 0 where the model's files do not say.

    >>> attention_cost(ModelFacts(path="m", parameters=1_500_000_000, layers=30, query_width=1_500))
    3e-05
    """
    width = model.query_width or model.hidden
    return model.layers * width / model.parameters if model.parameters and model.layers and width else 0.0


def skips_zero_advantage(recipe: Recipe, problems: list[PlanProblem]) -> bool:
    asked = recipe.batch.skip_zero_advantage
    why = trained_without_advantage(recipe)
    if asked is True and why is not None:
        hint = "use auto or false"
        problems.append(PlanProblem(path="batch.skip_zero_advantage", message="cannot be true here", reason=why, hint=hint))
    return asked is not False and why is None


def trained_without_advantage(recipe: Recipe) -> str | None:
    """Why a completion has a gradient of its own where its advantage is 0; None: it has none."""
    loss, kl = recipe.algorithm.loss, recipe.algorithm.kl
    reasons = {
        f"the loss `{loss.kind}` has more terms than advantage times ratio": loss.kind in MORE_THAN_ADVANTAGES,
        "the KL term in the loss is for every completion": kl.place == "loss" and kl.coefficient > 0,
        "the entropy bonus is for every completion": loss.entropy_coefficient > 0 or loss.entropy_controller is not None,
        "models.policy.router_loss is for every completion": recipe.models.policy.router_loss > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
