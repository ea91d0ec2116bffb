"""What a recipe says about completions whose advantage is 0. Leaves out the terms themselves (`algo.losses`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

MORE_THAN_ADVANTAGES = ("cpg", "dro", "kl_cov", "python")
"""Losses with a term, or one that may be there, that is no multiple of the advantage."""


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
