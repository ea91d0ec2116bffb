"""Rules across keys about evaluation, the end of a run that does not get better, and the run's name; `rules` has the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from rftcli.recipe import data_rules, reward_rules, scorer_rules
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.names import did_you_mean
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import EvalSource, Recipe

NAME_FIELDS = ("date", "time", "model", "recipe", "seed")
"""What a run's name may hold in braces; `runtime.naming` knows what stands for them."""
OF_REWARDS: tuple[Callable[[Recipe, KnownRules | None], Iterator[Finding]], ...] = (
    data_rules.rewards_empty,
    data_rules.rewards_weightless,
    data_rules.part_source,
    data_rules.part_names,
    data_rules.known_rule,
    data_rules.known_option,
    reward_rules.combine,
    reward_rules.part_bounds,
    scorer_rules.known_scorer,
)
"""Rules of `rewards` that `eval.rewards` keeps too."""


def temperature_of(recipe: Recipe, source: EvalSource) -> float:
    own = source.sampling.temperature
    return recipe.eval.temperature if own is None else own


def greedy(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name, source in recipe.data.eval.items():
        if temperature_of(recipe, source) == 0 and source.samples_per_prompt > 1:
            key: KeyPath = ("data", "eval", name, "sampling", "temperature") if source.sampling.temperature is not None else ("eval", "temperature")
            shown = "its `sampling.temperature`" if len(key) > 2 else "`eval.temperature`"
            yield Finding(
                path=("data", "eval", name, "samples_per_prompt"),
                message=f"must be 1 while {shown} is 0, got {source.samples_per_prompt}",
                reason="greedy samples are all the same",
                hint=f"set {shown} above 0",
                reads=(key,),
            )


def pass_k(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    yield from _enough_samples(recipe, "pass_k", recipe.eval.pass_k, "pass")


def vote_k(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    yield from _enough_samples(recipe, "vote_k", recipe.eval.vote_k, "maj")


def _enough_samples(recipe: Recipe, key: str, values: tuple[int, ...], metric: str) -> Iterator[Finding]:
    samples = [source.samples_per_prompt for source in recipe.data.eval.values()]
    for index, k in enumerate(values):
        if samples and k > max(samples):
            yield Finding(
                path=("eval", key, index),
                message=f"{metric}@{k} needs at least {k} samples per prompt, the evaluation sets have {max(samples)}",
                reason=f"no set of `data.eval` has `samples_per_prompt: {k}`",
                reads=(("data", "eval"),),
            )


def without_data(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.eval.every != 0 and not recipe.data.eval:
        yield Finding(
            path=("eval", "every"),
            message=f"is {recipe.eval.every}, but there is nothing to evaluate",
            reason="`data.eval` has no set",
            hint="add a set: `data: {eval: {test: {path: test.jsonl}}}`",
            reads=(("data", "eval"),),
        )


def rewards(recipe: Recipe, known: KnownRules | None) -> Iterator[Finding]:
    """The rules of `rewards`, on the recipe with `eval.rewards` in its place."""
    own = recipe.eval.rewards
    if own is None:
        return
    swapped = recipe.model_copy(update={"rewards": own})
    for check in OF_REWARDS:
        for found in check(swapped, known):
            yield replace(found, path=_moved(found.path), reads=tuple(map(_moved, found.reads)))


def _moved(path: KeyPath) -> KeyPath:
    return ("eval", *path) if path[0] == "rewards" else path


def token_range(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name, source in recipe.data.eval.items():
        low, high = source.sampling.min_new_tokens, source.sampling.max_new_tokens or recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens
        if low is not None and low > high:
            here = ("data", "eval", name, "sampling")
            yield Finding(
                path=(*here, "min_new_tokens"),
                message=f"must be at most `max_new_tokens`, got {low} above {high}",
                reads=((*here, "max_new_tokens"), ("eval", "max_new_tokens"), ("rollout", "max_new_tokens")),
            )


def metrics_of(recipe: Recipe, source: EvalSource) -> tuple[str, ...]:
    """Names of the metrics that an evaluation of the set has."""
    samples = source.samples_per_prompt
    several = (f"best@{samples}", f"worst@{samples}", f"std@{samples}") if samples > 1 else ()
    passes = tuple(f"pass@{k}" for k in recipe.eval.pass_k if k <= samples)
    votes = tuple(f"maj@{k}" for k in recipe.eval.vote_k if k <= samples)
    return (f"mean@{samples}", *several, *passes, *votes, "response_tokens", "truncated_fraction")


def early_stop(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    wanted = recipe.train.early_stop
    if wanted is None or not wanted.metric.startswith("eval."):
        return
    path = ("train", "early_stop", "metric")
    rest = wanted.metric.removeprefix("eval.")
    name = max((name for name in recipe.data.eval if rest.startswith(f"{name}.")), key=len, default=None)
    if name is None:
        yield Finding(
            path=path,
            message=f"`{wanted.metric}` names no evaluation set",
            reason="it is `eval.NAME.METRIC` with a NAME of `data.eval`",
            allowed=tuple(f"eval.{name}.{metrics_of(recipe, source)[0]}" for name, source in recipe.data.eval.items()),
            reads=(("data", "eval"),),
        )
        return
    metric, known = rest.removeprefix(f"{name}."), metrics_of(recipe, recipe.data.eval[name])
    if metric not in known and not metric.startswith("labels."):
        yield Finding(
            path=path,
            message=f"the set `{name}` has no metric `{metric}`",
            reason=did_you_mean(metric, known),
            allowed=tuple(f"eval.{name}.{one}" for one in known),
            reads=(("data", "eval", name), ("eval", "pass_k"), ("eval", "vote_k")),
        )
    if recipe.eval.every == 0:
        yield Finding(
            path=path,
            message="needs evaluations during training",
            reason="`eval.every` is 0",
            hint="set `eval.every`, for example `eval: {every: 10}`",
            reads=(("eval", "every"),),
        )


def name_pattern(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rest = recipe.name or ""
    for name in NAME_FIELDS:
        rest = rest.replace(f"{{{name}}}", "")
    if "{" in rest or "}" in rest:
        found = re.search(r"\{([^{}]*)\}", rest)
        yield Finding(
            path=("name",),
            message=f"there is no field `{{{found[1]}}}`" if found else "a brace that is not closed",
            reason=did_you_mean(found[1], NAME_FIELDS) if found else None,
            allowed=tuple(f"{{{name}}}" for name in NAME_FIELDS),
        )
