"""Rules across keys about how parts are combined and rewards shaped; `rules` has the table. Those of single parts are in `data_rules`."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import Recipe


def combine(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for label, reward in recipe.rewards.items():
        here = ("rewards", label)
        if reward.renormalise and reward.combine != "sum":
            how = "a function" if not isinstance(reward.combine, str) else f"`{reward.combine}`"
            yield Finding(
                path=(*here, "renormalise"),
                message=f"has no effect with {how}",
                reason="only a sum has weights to share out",
                reads=((*here, "combine"),),
            )
        if reward.combine == "gate" and sum(part.weight != 0 for part in reward.parts) < 2:
            yield Finding(
                path=(*here, "combine"),
                message="`gate` needs two parts with a weight",
                reason="the first is the gate, the others are what it lets pass",
                reads=((*here, "parts"),),
            )


def part_bounds(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for label, reward in recipe.rewards.items():
        for index, part in enumerate(reward.parts):
            yield from _bounds(("rewards", label, "parts", index, "clip"), part.clip)
            if part.model is not None and part.timeout_seconds is not None:
                yield Finding(
                    path=("rewards", label, "parts", index, "timeout_seconds"),
                    message="has no effect with `model`",
                    reason="a model scores all answers of a rollout together, and a service has a `timeout_seconds` of its own",
                    hint=f"`models.scorers.{part.model}.timeout_seconds` where it is a service",
                )


def reward_bounds(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    yield from _bounds(("reward_shaping", "clip"), recipe.reward_shaping.clip)


def _bounds(path: KeyPath, clip: tuple[float, float] | None) -> Iterator[Finding]:
    if clip is not None and clip[0] >= clip[1]:
        yield Finding(path=path, message=f"the lower bound must be below the upper, got [{clip[0]:g}, {clip[1]:g}]")


def truncation(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    shaping = recipe.reward_shaping
    reads = (("reward_shaping", "truncated"),)
    if shaping.truncated_factor != 0 and shaping.truncated != "penalise":
        message = f"has no effect with `truncated: {shaping.truncated}`"
        yield Finding(path=("reward_shaping", "truncated_factor"), message=message, hint="set `truncated: penalise`", reads=reads)
    if shaping.truncated == "mask" and recipe.rollout.ignore_eos:
        yield Finding(
            path=("reward_shaping", "truncated"),
            message="`mask` would leave every answer out: `rollout.ignore_eos` truncates all of them",
            reads=(("rollout", "ignore_eos"),),
        )
    if shaping.truncated == "mask" and shaping.missing_eos_penalty:
        path = ("reward_shaping", "missing_eos_penalty")
        yield Finding(path=path, message="has no effect with `truncated: mask`", reason="answers that did not end are left out already", reads=reads)
