"""Which completions pass through the model in an update, and on which rank. What it leaves out: how they travel (`stages.spread`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.facts import ModelFacts
from rftcli.recipe.sections.passing import trained_without_advantage

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


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


PASS_POSITIONS, PASS_MULTIPLICATIONS = 32, 22_000_000
"""What a pass of an update costs on a CPU beside its positions: so many of them, and so many multiplications of a position with a parameter, which is
what calls take in the meantime (`benchmarks.update --shape tiny` with smaller and smaller budgets; passes of c2's and c3's models)."""


def pass_cost(model: ModelFacts, device: str, layout: str, budget: int | None, *, shares: bool = False) -> int:
    """Of `BatchPlan`. On a GPU calls take as long as some thousand positions: there a budget is filled, with groups in which prompts are shared where
    that computes few of them again: a pass of a small model, of which the host is the slower side, takes nearly as long when it is half full.

    >>> pass_cost(ModelFacts(path="m", parameters=1_000_000), "cpu", "padded", 8192)
    54
    """
    if budget is None:
        return 0
    if device != "cpu":
        return budget // 4 if shares else 0
    return PASS_POSITIONS + round(PASS_MULTIPLICATIONS / (model.parameters or PASS_MULTIPLICATIONS)) if layout == "padded" else 0


def skips_zero_advantage(recipe: Recipe) -> bool:
    """`true` where it cannot be is refused with the recipe."""
    return recipe.batch.skip_zero_advantage is not False and trained_without_advantage(recipe) is None
