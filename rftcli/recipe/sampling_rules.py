"""Rules across keys about which completions are asked for and trained on: refill, replay, filtering, labels, curriculum."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe import partial_rules
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import Recipe

REWARD = "reward"
"""The metric that is no part."""


def compares(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """What looks at the spread of a group needs a group."""
    if recipe.rollout.samples_per_prompt > 1:
        return
    for key, given in (("dynamic", recipe.rollout.dynamic), ("replay", recipe.rollout.replay), ("keep", recipe.rollout.keep)):
        if given is not None:
            yield Finding(
                path=("rollout", key),
                message="needs `samples_per_prompt` of at least 2",
                reason="one completion has no spread",
                reads=(("rollout", "samples_per_prompt"),),
                at_key=True,
            )


def metrics(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """A metric is the reward or a part of every label."""
    asked: list[tuple[KeyPath, str]] = []
    if recipe.rollout.dynamic is not None:
        asked.append((("rollout", "dynamic", "metric"), recipe.rollout.dynamic.metric))
    if recipe.data.curriculum is not None and recipe.data.curriculum.kind == "pass_rate":
        asked.append((("data", "curriculum", "metric"), recipe.data.curriculum.metric))
    parts = {label: [part.shown_name for part in entry.parts] for label, entry in recipe.rewards.items()}
    named = {label: tuple(f"{part.shown_name}." for part in entry.parts if part.python) for label, entry in recipe.rewards.items()}
    for path, metric in asked:
        known = [label for label, names in parts.items() if metric == REWARD or metric in names or metric.startswith(named[label])]
        lacking = next((label for label in parts if label not in known), None)
        if lacking is not None:
            common = sorted(set.intersection(*map(set, parts.values())))
            yield Finding(
                path=path,
                message=f"`rewards.{lacking}` has no part `{metric}`",
                reason="it is `reward`, or a part that every label has",
                allowed=(REWARD, *common),
                reads=(("rewards",),),
            )


def replayed_share(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    replay, prompts = recipe.rollout.replay, recipe.batch.prompts_per_step
    if replay is not None and int(replay.share * prompts) < 1:
        yield Finding(
            path=("rollout", "replay", "share"),
            message=f"{replay.share:g} of {prompts} prompts a step is not one prompt: none would ever come back",
            hint=f"at least {1 / prompts:.3g}",
            reads=(("batch", "prompts_per_step"),),
        )


def ranges(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    dynamic, curriculum = recipe.rollout.dynamic, recipe.data.curriculum
    found = {
        ("rollout", "dynamic", "range"): None if dynamic is None else dynamic.range,
        ("data", "curriculum", "range"): None if curriculum is None else curriculum.range,
    }
    for path, bounds in found.items():
        if bounds is not None and bounds[0] >= bounds[1]:
            yield Finding(path=path, message=f"the first number is the lower bound, got {bounds[0]:g} and {bounds[1]:g}")
    if curriculum is not None and (min(curriculum.range) < 0 or max(curriculum.range) > 1):
        yield Finding(path=("data", "curriculum", "range"), message="a pass rate lies between 0 and 1")


def one_rollout(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.rollout.dynamic is not None and recipe.batch.rollouts_per_update > 1:
        yield Finding(
            path=("batch", "rollouts_per_update"),
            message="must be 1 with `rollout.dynamic`",
            reason="a refill is a further rollout of its own size",
            reads=(("rollout", "dynamic"),),
        )


def over_sampled(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rollout, path = recipe.rollout, ("rollout", "over_sample")
    if rollout.over_sample is None:
        return
    if rollout.dynamic is not None and rollout.partial is None:
        yield Finding(
            path=path,
            message="does not go together with `rollout.dynamic`",
            reason="one drops groups by their length and the other by their rewards: what is left would be short answers with a spread",
            hint="`rollout.partial` drops nothing by its length",
            reads=(("rollout", "dynamic"), ("rollout", "partial")),
            at_key=True,
        )
    if recipe.batch.rollouts_per_update > 1:
        why = "over-sampling has one pool of candidates"
        reads = (("batch", "rollouts_per_update"),)
        yield Finding(path=path, message="needs `batch.rollouts_per_update` of 1", reason=why, reads=reads, at_key=True)
    if recipe.algorithm.advantage.kind in ("remax",) and rollout.partial is None:
        why, reads = "a greedy answer would be stopped with the others", (("algorithm", "advantage", "kind"), ("rollout", "partial"))
        yield Finding(path=path, message="does not go together with `remax`", reason=why, reads=reads, at_key=True)
    if rollout.max_new_tokens != "auto" and rollout.over_sample.slice_tokens >= rollout.max_new_tokens:
        yield Finding(
            path=(*path, "slice_tokens"),
            message=f"must be below `rollout.max_new_tokens`, got {rollout.over_sample.slice_tokens} of {rollout.max_new_tokens}",
            reason="every answer would be finished before anything is stopped",
            reads=(("rollout", "max_new_tokens"),),
        )


def kept(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    keep, samples, kl = recipe.rollout.keep, recipe.rollout.samples_per_prompt, recipe.algorithm.kl
    if keep is None:
        return
    both = (("rollout", "keep", "best"), ("rollout", "keep", "worst"), ("rollout", "samples_per_prompt"))
    if keep.best + keep.worst == 0:
        yield Finding(path=("rollout", "keep"), message="keeps nothing to train on", reads=both, at_key=True)
    elif samples > 1 and keep.best + keep.worst >= samples:
        message = f"keeps {keep.best} + {keep.worst} of {samples} completions, which is all of them"
        yield Finding(path=("rollout", "keep"), message=message, hint="sample more, or leave `keep` out", reads=both, at_key=True)
    if kl.coefficient > 0 and kl.place == "reward":
        yield Finding(
            path=("rollout", "keep"),
            message="does not go together with the KL term in the reward",
            reason="the KL is known of trained completions alone, and the baseline would compare rewards with and without it",
            hint="put the KL term into the loss: `algorithm.kl.place: loss`",
            reads=(("algorithm", "kl", "coefficient"), ("algorithm", "kl", "place")),
            at_key=True,
        )


def streamed(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if not any(source.streaming for source in recipe.data.train):
        return
    for path, given in ((("rollout", "replay"), recipe.rollout.replay), (("data", "curriculum"), recipe.data.curriculum)):
        if given is not None:
            yield Finding(
                path=path,
                message="does not go together with a streamed training set",
                reason="rows of earlier blocks are no longer in memory",
                hint="leave `streaming` out where the set fits into memory",
                reads=(("data", "train"),),
                at_key=True,
            )


def labels(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rollout = recipe.rollout
    for label, own in rollout.by_label.items():
        path: KeyPath = ("rollout", "by_label", label)
        longest = rollout.max_new_tokens if own.max_new_tokens is None else own.max_new_tokens
        if own.max_new_tokens is not None and rollout.max_new_tokens != "auto" and own.max_new_tokens > rollout.max_new_tokens:
            yield Finding(
                path=(*path, "max_new_tokens"),
                message=f"must be at most `rollout.max_new_tokens`, got {own.max_new_tokens} above {rollout.max_new_tokens}",
                reason="memory and positions are planned for the longest of all",
                reads=(("rollout", "max_new_tokens"),),
            )
        shortest = rollout.min_new_tokens if own.min_new_tokens is None else own.min_new_tokens
        if longest != "auto" and shortest > longest:
            key = "min_new_tokens" if own.min_new_tokens is not None else "max_new_tokens"
            message = f"its shortest completion has {shortest} tokens, its longest {longest}"
            yield Finding(path=(*path, key), message=message, reads=(("rollout", "min_new_tokens"), ("rollout", "max_new_tokens")))
        if own.top_k == 1:
            yield Finding(path=(*path, "top_k"), message="must not be 1 in training", reason="only the likeliest token is left; 0 is off")
        if rollout.structured is not None and own.min_new_tokens:
            why = "the form decides where a completion ends"
            yield Finding(path=(*path, "min_new_tokens"), message="must be 0 with `structured`", reason=why, reads=(("rollout", "structured"),))


def first_token(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rollout = recipe.rollout
    served = rollout.engine == "auto" and rollout.vllm.server is not None
    if rollout.first_token_temperature is not None and (served or rollout.engine not in ("auto", "hf")):
        yield Finding(
            path=("rollout", "first_token_temperature"),
            message=f"needs the engine `hf`, not `{'vllm' if served else rollout.engine}`",
            reason="other engines take one temperature for a whole completion",
            reads=(("rollout", "vllm", "server") if served else ("rollout", "engine"),),
            at_key=True,
        )


def curriculum_kind(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    curriculum = recipe.data.curriculum
    if curriculum is None:
        return
    path: KeyPath = ("data", "curriculum")
    reads = ((*path, "kind"), (*path, "python"))
    if curriculum.kind == "python" and curriculum.python is None:
        yield Finding(path=path, message="`kind: python` needs `python`: the class, as `module:class`", reads=reads, at_key=True)
    if curriculum.kind != "python" and curriculum.python is not None:
        yield Finding(path=(*path, "python"), message="has no effect without `kind: python`", reads=reads, at_key=True)
    if curriculum.kind != "python" and curriculum.options:
        yield Finding(path=(*path, "options"), message="has no effect without `kind: python`", reads=reads, at_key=True)
    measured = ("range", "share", "metric", "pass_mark", "memory")
    changed = [name for name in measured if getattr(curriculum, name) != type(curriculum).model_fields[name].default]
    if curriculum.kind == "python" and changed:
        yield Finding(path=(*path, changed[0]), message="has no effect with `kind: python`", reason="the class decides", reads=reads, at_key=True)


Row = partial_rules.Row
# How to add one: a small function above and a line here.
ROWS: dict[str, Row] = {
    "spread-of-one": (
        ("rollout.dynamic", "rollout.replay", "rollout.keep"),
        "What looks at the spread of a group needs two samples.",
        compares,
    ),
    "sampling-metric": (("rollout.dynamic.metric", "data.curriculum.metric"), "A metric is the reward or a part that every label has.", metrics),
    "replayed-share": (
        ("rollout.replay.share", "batch.prompts_per_step"), "The share of prompts that may come back is at least one prompt a step.", replayed_share
    ),
    "sampling-range": (("rollout.dynamic.range", "data.curriculum.range"), "A range has its lower bound first.", ranges),
    "refill-in-one-rollout": (
        ("rollout.dynamic", "batch.rollouts_per_update"), "Dynamic sampling has one rollout an update, beside its refills.", one_rollout
    ),
    "over-sampling": (
        ("rollout.over_sample", "rollout.over_sample.slice_tokens"),
        "Over-sampling stops answers before their end, and is the only strategy that drops groups of a step.",
        over_sampled,
    ),
    "kept-samples": (
        ("rollout.keep", "rollout.keep.best", "rollout.keep.worst"), "Filtering keeps some completions of a prompt and not all.", kept
    ),
    "remembered-rows": (
        ("rollout.replay", "data.curriculum", "data.train[].streaming"), "What comes back or is passed over lies in memory.", streamed
    ),
    "label-sampling": (("rollout.by_label",), "Sampling of a label stays within that of the rollout.", labels),
    "first-token": (
        ("rollout.first_token_temperature", "rollout.engine", "rollout.vllm.server"),
        "A temperature of the first token needs the engine `hf`.",
        first_token,
    ),
    "curriculum-kind": (
        ("data.curriculum.kind", "data.curriculum.python", "data.curriculum.options"),
        "A curriculum is measured, or a class of yours.",
        curriculum_kind,
    ),
    **partial_rules.ROWS,
}  # fmt: skip
"""Code -> keys it concerns, the rule in one sentence, its check."""
