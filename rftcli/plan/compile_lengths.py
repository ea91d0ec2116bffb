"""Prompts and completions against the positions of the model. Needs no plan, so that a recipe can be checked without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def with_length(recipe: Recipe, facts: Facts, problems: list[PlanProblem], notes: list[str]) -> Recipe:
    """The recipe with a number for `rollout.max_new_tokens: auto`: what the model's positions leave beside the longest prompt."""
    if recipe.rollout.max_new_tokens != "auto":
        return recipe
    prompt, limit = recipe.rollout.max_prompt_tokens, facts.model.max_positions
    new = 1 if limit is None else max(1, limit - prompt)
    if limit is None:
        message = "`auto` needs the model's positions, and its files do not say how many there are"
        problems.append(PlanProblem(path="rollout.max_new_tokens", message=message, hint="write a number"))
    elif limit <= prompt:
        message = f"`auto` leaves no position: max_prompt_tokens is {prompt}, the model has {limit}"
        problems.append(PlanProblem(path="rollout.max_new_tokens", message=message, hint="lower `rollout.max_prompt_tokens`"))
    else:
        notes.append(f"rollout.max_new_tokens {new}: {limit} positions of the model - {prompt} of the longest prompt")
    shortest = recipe.rollout.min_new_tokens
    if limit is not None and limit > prompt and shortest > new:
        problems.append(PlanProblem(path="rollout.min_new_tokens", message=f"must be at most `max_new_tokens`, got {shortest} above {new}"))
    changed: dict[str, Any] = {"rollout": recipe.rollout.model_copy(update={"max_new_tokens": new})}
    return recipe.model_copy(update=changed)


def check_lengths(recipe: Recipe, facts: Facts, problems: list[PlanProblem], notes: list[str]) -> None:
    limit, switch = facts.model.max_positions, facts.model.rope_switch
    longest = int(recipe.rollout.max_prompt_tokens) + int(recipe.rollout.max_new_tokens)
    if switch is not None and longest > switch:
        notes.append(
            f"the model's rotary frequencies are others from {switch} positions on, for all rows of a pass that has a longer one: log-probs of short "
            f"rows then depend on their neighbours; keep max_prompt_tokens + max_new_tokens, {longest} here, within {switch}, or set "
            "batch.micro_batch_size: 1"
        )
    if limit is None:
        return
    prompt, found = recipe.rollout.max_prompt_tokens, {problem.path for problem in problems}
    lengths: dict[str, Any] = {"rollout.max_new_tokens": recipe.rollout.max_new_tokens}
    own = {f"rollout.by_label.{label}.max_new_tokens": sampling.max_new_tokens for label, sampling in recipe.rollout.by_label.items()}
    lengths |= {path: tokens for path, tokens in own.items() if tokens is not None}
    if recipe.data.eval and recipe.eval.max_new_tokens is not None:
        lengths["eval.max_new_tokens"] = recipe.eval.max_new_tokens
    for path, new in lengths.items():
        if prompt + new > limit and path not in found:
            message = f"max_prompt_tokens {prompt} + max_new_tokens {new} = {prompt + new} positions, the model has {limit}"
            problems.append(PlanProblem(path=path, message=message, hint=shorter(prompt, new, limit)))


def check_eval_lengths(recipe: Recipe, facts: Facts, problems: list[PlanProblem]) -> None:
    """Lengths of sets of their own against the positions of the model."""
    limit, prompt = facts.model.max_positions, recipe.rollout.max_prompt_tokens
    for name, source in recipe.data.eval.items():
        new = source.sampling.max_new_tokens
        if limit is not None and new is not None and prompt + new > limit:
            message = f"max_prompt_tokens {prompt} + max_new_tokens {new} = {prompt + new} positions, the model has {limit}"
            hint = shorter(prompt, new, limit)
            problems.append(PlanProblem(path=f"data.eval.{name}.sampling.max_new_tokens", message=message, hint=hint))


def shorter(prompt: int, new: int, limit: int) -> str:
    """Which numbers fit. Either may be a default that nobody wrote, so both are named."""
    ways = [f"`rollout.max_prompt_tokens: {limit - new}`"] if new < limit else []
    ways += [f"at most {limit - prompt} new tokens"] if prompt < limit else []
    return f"the sum must be at most {limit}: {' or '.join(ways)}" if ways else f"the sum must be at most {limit}"
