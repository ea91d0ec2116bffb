"""Rules of `rollout.partial` across keys: what ends a step early, how old tokens may be, and what makes them right to train on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import Recipe
from rftcli.recipe.sections.loss import LOSS_OPTIONS

PARTIAL: KeyPath = ("rollout", "partial")
BUDGET: KeyPath = (*PARTIAL, "budget_tokens")
LAG: KeyPath = ("rollout", "max_version_lag")
OVER_SAMPLE: KeyPath = ("rollout", "over_sample")
LOSS: KeyPath = ("algorithm", "loss")
WEIGHING = ("truncate", "mask")
"""Corrections that weigh a token with the ratio of the policy to its sampler."""


def ends_early(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rollout = recipe.rollout
    if rollout.partial is None:
        return
    budget, longest = rollout.partial.budget_tokens, rollout.max_new_tokens
    if budget is None and rollout.over_sample is None:
        yield Finding(
            path=PARTIAL,
            message="needs `budget_tokens` or `rollout.over_sample`",
            reason="without them every answer is finished in its step, and nothing is kept",
            reads=(BUDGET, OVER_SAMPLE),
            at_key=True,
        )
    elif budget is not None and longest != "auto" and budget >= longest:
        yield Finding(
            path=BUDGET,
            message=f"must be below `rollout.max_new_tokens`, got {budget} of {longest}",
            reason="every answer would be finished in its step",
            reads=(("rollout", "max_new_tokens"),),
        )
    if budget is not None and rollout.over_sample is not None and rollout.over_sample.slice_tokens > budget:
        slices = (*OVER_SAMPLE, "slice_tokens")
        message = f"must be at most `rollout.partial.budget_tokens`, got {rollout.over_sample.slice_tokens} of {budget}"
        yield Finding(path=slices, message=message, reason="no answer grows by more before groups are counted", reads=(BUDGET,))


def one_pool(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.rollout.partial is None:
        return
    if recipe.batch.rollouts_per_update > 1:
        path: KeyPath = ("batch", "rollouts_per_update")
        yield Finding(
            path=PARTIAL, message="needs `batch.rollouts_per_update` of 1", reason="there is one pool of answers", reads=(path,), at_key=True
        )
    if any(source.streaming for source in recipe.data.train):
        yield Finding(
            path=PARTIAL,
            message="does not go together with a streamed training set",
            reason="the row of an answer that goes on may no longer be in memory",
            hint="leave `streaming` out where the set fits into memory",
            reads=(("data", "train"),),
            at_key=True,
        )


def version_lag(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rollout, updates = recipe.rollout, recipe.batch.updates_per_step * recipe.batch.epochs
    lag = rollout.max_version_lag
    if rollout.partial is None:
        if lag > 0:
            why = "every token comes from the newest weights"
            yield Finding(path=LAG, message="has no effect without `rollout.partial`", reason=why, reads=(PARTIAL,))
        return
    reads: tuple[KeyPath, ...] = (LAG, ("batch", "updates_per_step"), ("batch", "epochs"))
    if lag < updates:
        yield Finding(
            path=PARTIAL,
            message=f"needs a `rollout.max_version_lag` of at least {updates}, got {lag}",
            reason=f"an answer that goes on in the next step is so many versions old: a step makes {updates} update{'s' if updates > 1 else ''}",
            hint=f"`max_version_lag: {2 * updates}` lets answers take three steps",
            reads=reads,
            at_key=True,
        )
    elif rollout.over_sample is not None and rollout.over_sample.factor - 1 > lag // updates:
        least = math.ceil(rollout.over_sample.factor - 1) * updates
        yield Finding(
            path=(*OVER_SAMPLE, "factor"),
            message=f"{rollout.over_sample.factor:g} needs a `rollout.max_version_lag` of at least {least}, got {lag}",
            reason="more groups would wait than can be trained on before they are too old",
            hint="lower the factor, or let tokens be older",
            reads=reads,
        )


def old_tokens(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """A token of older weights has a ratio other than 1 to the policy, which something has to hold."""
    loss = recipe.algorithm.loss
    if recipe.rollout.partial is None:
        return
    why = "tokens of older weights were sampled by another policy than the one that is trained: each needs its ratio to the policy that sampled it"
    if loss.correction is None and loss.old != "sampler":
        reads: tuple[KeyPath, ...] = ((*LOSS, "old"), (*LOSS, "correction"))
        hint = "or recomputed log-probs with `correction: {kind: truncate}` (or mask)"
        yield Finding(path=PARTIAL, message="needs `algorithm.loss.old: sampler`", reason=why, hint=hint, reads=reads, at_key=True)
    elif loss.correction is not None and loss.correction.kind not in WEIGHING:
        kind: KeyPath = (*LOSS, "correction", "kind")
        yield Finding(path=kind, message=f"must be truncate or mask with `rollout.partial`, got {loss.correction.kind}", reason=why, reads=(PARTIAL,))
    elif loss.correction is None and loss.kind == "reinforce":
        name = "importance_weight"
        if not loss.options.get(name, LOSS_OPTIONS["reinforce"][name]):
            message = "`reinforce` needs `importance_weight` with `rollout.partial`"
            hint = "`options: {importance_weight: true}`"
            yield Finding(path=(*LOSS, "kind"), message=message, reason=why, hint=hint, reads=(PARTIAL, (*LOSS, "options")))


Row = tuple[tuple[str, ...], str, Callable[[Recipe, KnownRules | None], Iterator[Finding]]]
# How to add one: a small function above and a line here.
ROWS: dict[str, Row] = {
    "partial-ends": (
        ("rollout.partial", "rollout.partial.budget_tokens"),
        "Partial rollouts need something that ends a step before its longest answer.",
        ends_early,
    ),
    "partial-pool": (
        ("rollout.partial", "batch.rollouts_per_update", "data.train[].streaming"),
        "Answers that go on are in one pool, and their rows in memory.",
        one_pool,
    ),
    "version-lag": (
        ("rollout.max_version_lag", "rollout.partial", "rollout.over_sample.factor"),
        "Answers that wait can be trained on before they are too old.",
        version_lag,
    ),
    "partial-tokens": (
        ("rollout.partial", "algorithm.loss.old", "algorithm.loss.correction.kind"),
        "Tokens of older weights are weighed against the policy that sampled them.",
        old_tokens,
    ),
}
"""Code -> keys it concerns, the rule in one sentence, its check."""
