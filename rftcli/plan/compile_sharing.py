"""Whether the prompt of a group goes through the model once for all of its completions, in the same micro-batch.

What it leaves out: how (`algo.align.shared`, `models.packed_rows`), and the proof that log-probs stay the model's own (the start of every run).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rftcli.plan.compile_models import PACKING
from rftcli.plan.compile_packing import flash_runs
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import MachineFacts, ModelFacts

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

SHARING = ("varlen", "sdpa", "eager")
"""Kinds of attention that know shared prompts; the last two by a mask over the whole row."""
WORTH = 0.15
"""Share of a packed update's tokens that has to be saved: the second call of the attention kernel and the merge cost about an eighth of the time."""
WORTH_OF_ROWS = 0.25
"""The same on a GPU where micro-batches have so many rows: no pass is saved then, and each gives the host a fifth more to start."""
WORTH_PACKING = 0.5
"""The same of an update whose rows would be padded otherwise: real prompts are shorter than the longest, and some gain has to be left then."""


def with_sharing(
    recipe: Recipe, models: Iterable[ModelFacts | None], machine: MachineFacts, problems: list[PlanProblem], notes: list[str]
) -> Recipe:
    """The recipe with a value for `batch.share_prompts`; where it is true, rows are packed, and `auto` attention is varlen. `models`: facts of all
    that micro-batches go through, where they are known."""
    asked = recipe.batch.share_prompts
    shares = _asked_for(recipe, models, problems) if asked is True else asked == "auto" and _worth_it(recipe, models, machine, notes)
    batch = recipe.batch.model_copy(update={"share_prompts": shares} | ({"layout": "packed"} if shares else {}))
    changed: dict[str, object] = {"batch": batch}
    if shares and recipe.models.policy.attention == "auto":
        policy = recipe.models.policy.model_copy(update={"attention": "varlen"})
        changed["models"] = recipe.models.model_copy(update={"policy": policy})
    return recipe.model_copy(update=changed)


def saved_share(recipe: Recipe) -> float:
    """Share of an update's tokens that need not be computed, with prompts and completions as long as they can be."""
    rollout = recipe.rollout
    samples, prompt, completion = rollout.samples_per_prompt, int(rollout.max_prompt_tokens), int(rollout.max_new_tokens)
    return (samples - _copies(recipe)) * prompt / (samples * (prompt + completion))


def _copies(recipe: Recipe) -> float:
    """How often a group's prompt is computed: once, and once more for each cut inside the group."""
    rollout, batch = recipe.rollout, recipe.batch
    samples, prompt, completion = rollout.samples_per_prompt, int(rollout.max_prompt_tokens), int(rollout.max_new_tokens)
    if batch.micro_batch_size != "auto":  # cuts and ends of groups fall together once in their common multiple
        return 1 + (samples - math.gcd(samples, batch.micro_batch_size)) / batch.micro_batch_size
    if batch.tokens_per_micro_batch == "auto":
        return 1.0
    together = max(1, (batch.tokens_per_micro_batch - prompt) // completion)
    return float(math.ceil(samples / together))


def saved_positions(recipe: Recipe, rows: int) -> int:
    """Of an update's rows: those of prompts that stand once for their group."""
    samples = recipe.rollout.samples_per_prompt
    return rows // samples * (samples - 1) * int(recipe.rollout.max_prompt_tokens) if recipe.batch.share_prompts is True else 0


def _asked_for(recipe: Recipe, models: Iterable[ModelFacts | None], problems: list[PlanProblem]) -> bool:
    why = refusal(recipe, models)
    if recipe.batch.layout == "padded":
        why = "padded rows have a prompt each: `batch.layout: packed`"
    if why is not None:
        problems.append(PlanProblem(path="batch.share_prompts", message="cannot be true here", reason=why, hint="use auto or false"))
    return why is None


def _worth_it(recipe: Recipe, models: Iterable[ModelFacts | None], machine: MachineFacts, notes: list[str]) -> bool:
    attention, layout = recipe.models.policy.attention, recipe.batch.layout
    saved, flash = saved_share(recipe), flash_runs(recipe, machine)
    free = attention == layout == "auto" and flash
    of_rows = flash and recipe.batch.micro_batch_size != "auto"
    least = WORTH_PACKING if free else WORTH_OF_ROWS if of_rows else WORTH
    if layout == "padded" or not (free or attention in PACKING) or saved < least:
        if flash and saved >= WORTH_PACKING and (layout == "padded" or attention != "auto"):
            key = "batch.layout: padded" if layout == "padded" else f"models.policy.attention: {attention}"
            notes.append(f"prompts are not shared, which would save up to {saved:.0%} of the update's tokens: `{key}`")
        return False
    why = refusal(recipe, models)
    if why is not None:
        notes.append(f"prompts are not shared: {why}")
        return False
    notes.append(f"the prompt of a group goes through the model once in a micro-batch: up to {saved:.0%} of the update's tokens are saved")
    return True


def refusal(recipe: Recipe, models: Iterable[ModelFacts | None]) -> str | None:
    """Why prompts cannot be shared, whatever the layout; None: they can."""
    policy, teacher = recipe.models.policy, recipe.models.teacher
    longest = int(recipe.rollout.max_prompt_tokens) + int(recipe.rollout.max_new_tokens)
    reasons = {
        "a group has one completion": recipe.rollout.samples_per_prompt == 1,
        f"attention `{policy.attention}` does not know them: use varlen": policy.attention not in (*SHARING, "auto"),
        "dropout would draw once for a prompt instead of once for each completion": policy.dropout > 0 or bool(policy.lora and policy.lora.dropout),
        "models.policy.router_loss looks at each completion's whole sequence": policy.router_loss > 0,
        "the shape of a shared row would be compiled anew for every micro-batch (train.compile)": recipe.train.compile,
        "the teacher's server takes whole sequences": teacher is not None and teacher.server is not None,
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return found or next(filter(None, (_of_model(model, longest) for model in models if model is not None)), None)


def _of_model(model: ModelFacts, longest: int) -> str | None:
    if not model.plain_attention:
        return f"{model.path} caps its attention scores, shifts them or has sinks"
    if not model.attends_only:
        return f"{model.path} has layers that are no attention over the whole sequence"
    if model.window is not None and model.window < longest:
        return f"{model.path} has a sliding window of {model.window} tokens, and sequences have up to {longest}"
    return None
