"""The models of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.facts import Facts
from rftcli.plan.plan import (
    ModelPlan,
)

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

CHECKPOINTING_FROM_PARAMETERS = 2_000_000_000
"""Above this, activations of a micro-batch outweigh a third more compute."""


def model_plan(recipe: Recipe, facts: Facts, device: str, path: str) -> ModelPlan:
    policy = recipe.models.policy
    dtype = policy.dtype if policy.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    checkpointing = policy.gradient_checkpointing
    if checkpointing == "auto":
        checkpointing = device == "cuda" and (facts.model.parameters or 0) >= CHECKPOINTING_FROM_PARAMETERS
    return ModelPlan(
        path=path,
        given=policy.path,
        dtype=dtype,
        attention="sdpa" if policy.attention == "auto" else policy.attention,
        dropout=policy.dropout,
        gradient_checkpointing=bool(checkpointing),
        trust_remote_code=policy.trust_remote_code,
        options=dict(policy.options),
        parameters=facts.model.parameters,
    )
