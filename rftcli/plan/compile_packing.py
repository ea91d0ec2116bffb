"""Whether completions lie in packed rows where the recipe leaves layout or attention open.

Answers that end by themselves have other lengths in every step. Padded rows then compute their padding, and cuDNN's attention, the fastest for rows
of a shape that comes again, builds a plan for every new one; so rows are packed, for the flash kernel. Answers of one length keep padded rows. What
it leaves out: shared prompts (`compile_sharing`), which are packed in any case.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rftcli.plan.compile_kernels import PROVED
from rftcli.plan.facts import MachineFacts, ModelFacts

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def with_packing(recipe: Recipe, models: Iterable[ModelFacts | None], machine: MachineFacts, notes: list[str]) -> Recipe:
    """The recipe with `varlen` attention and packed rows where they gain and are known to work. `models`: facts of all that micro-batches go through,
    where they are known."""
    policy, batch = recipe.models.policy, recipe.batch
    if policy.attention != "auto" or batch.layout == "padded" or not flash_runs(recipe, machine):
        return recipe
    if policy.dropout > 0 or policy.router_loss > 0 or policy.trust_remote_code or recipe.train.compile:
        return recipe
    if not all(model is None or (model.architecture in PROVED and model.plain_attention and model.attends_only) for model in models):
        return recipe
    if batch.layout == "auto":
        if not lengths_vary(recipe):
            return recipe
        notes.append("rows are packed, with varlen attention, since answers end at different lengths")
    packed = {"models": recipe.models.model_copy(update={"policy": policy.model_copy(update={"attention": "varlen"})})}
    return recipe.model_copy(update={**packed, "batch": batch.model_copy(update={"layout": "packed"})})


def padding_notes(recipe: Recipe, machine: MachineFacts) -> list[str]:
    """Why rows stayed padded where the plan might have packed them. `recipe`: after prompts that are shared."""
    free = recipe.models.policy.attention == "auto" and recipe.batch.layout == "auto"
    return ["rows are padded, since all answers have one length"] if free and flash_runs(recipe, machine) and not lengths_vary(recipe) else []


def flash_runs(recipe: Recipe, machine: MachineFacts) -> bool:
    """Whether the policy's number type and the card have a kernel for packed rows."""
    return machine.has_bfloat16 and recipe.models.policy.dtype != "float32"


def lengths_vary(recipe: Recipe) -> bool:
    """Whether answers may end before their longest length."""
    rollout = recipe.rollout
    ends = not rollout.ignore_eos or bool(rollout.stop) or bool(rollout.stop_token_ids)
    return ends and rollout.min_new_tokens != rollout.max_new_tokens
