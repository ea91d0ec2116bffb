"""Rules across keys of the sections `rewards` and `data`; `rules` has the table.

Each yields a `Finding` for every breach. What is left out: the rows themselves, which a scan of the data looks at.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.names import did_you_mean
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import DataSource, Recipe

PENALTY = "penalty"
"""The part that `stages.estimator_inputs` makes of what shaping added."""


def sources(recipe: Recipe) -> Iterator[tuple[KeyPath, DataSource]]:
    for index, source in enumerate(recipe.data.train):
        yield ("data", "train", index), source
    for name, other in recipe.data.eval.items():
        yield ("data", "eval", name), other


def rewards_empty(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if not recipe.rewards:
        hint = "`rft explain rewards`"
        yield Finding(path=("rewards",), message="has no entry", reason="at least one label needs a reward", hint=hint, at_key=True)
    for label, reward in recipe.rewards.items():
        if not reward.parts:
            yield Finding(path=("rewards", label, "parts"), message="has no part", reason="a reward is the sum of its parts", at_key=True)


def rewards_weightless(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for label, reward in recipe.rewards.items():
        if reward.parts and all(part.weight == 0 for part in reward.parts):
            reason = "every completion would have the reward 0"
            yield Finding(path=("rewards", label, "parts"), message="all weights are 0", reason=reason, at_key=True)


def part_source(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for label, reward in recipe.rewards.items():
        for index, part in enumerate(reward.parts):
            here = ("rewards", label, "parts", index)
            given = [name for name in ("rule", "model", "python") if getattr(part, name) is not None]
            if not given:
                sources = tuple((*here, name) for name in ("rule", "model", "python"))
                yield Finding(path=here, message="needs `rule`, `model` or `python`", reads=sources, at_key=True)
            for other in given[1:]:
                yield Finding(path=(*here, other), message=f"`{given[0]}` and `{other}` exclude each other", reason="write them as two parts")


def part_names(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for label, reward in recipe.rewards.items():
        counts = Counter(part.shown_name for part in reward.parts)
        seen: set[str] = set()
        for index, part in enumerate(reward.parts):
            name = part.shown_name
            if name and counts[name] > 1 and name in seen:
                yield Finding(
                    path=("rewards", label, "parts", index),
                    message=f"a second part named `{name}`",
                    reason="logs could not tell them apart",
                    hint="give it a `name`",
                    at_key=True,
                )
            seen.add(name)
            owner = next((other for other in reward.parts if other.python and other is not part and name.startswith(f"{other.shown_name}.")), None)
            if owner is not None:
                yield Finding(
                    path=("rewards", label, "parts", index, "name"),
                    message=f"`{name}` may be a value that part `{owner.shown_name}` returns by name",
                    reason="logs and estimators could not tell them apart",
                    hint="give it another `name`",
                    reads=(("rewards", label, "parts", index),),
                )
            if name == PENALTY:
                yield Finding(
                    path=("rewards", label, "parts", index, "name"),
                    message=f"`{PENALTY}` is what `reward_shaping` adds",
                    reason="estimators that read the parts of a reward see it as a part of this name",
                    hint="give it another `name`",
                    reads=(("rewards", label, "parts", index),),
                )


def known_rule(recipe: Recipe, known: KnownRules | None) -> Iterator[Finding]:
    for label, reward in recipe.rewards.items():
        for index, part in enumerate(reward.parts):
            if known is not None and part.rule is not None and part.rule not in known:
                path = ("rewards", label, "parts", index, "rule")
                names = tuple(sorted(known))
                yield Finding(path=path, message=f"unknown rule `{part.rule}`", reason=did_you_mean(part.rule, names), allowed=names)


def known_option(recipe: Recipe, known: KnownRules | None) -> Iterator[Finding]:
    for label, reward in recipe.rewards.items():
        for index, part in enumerate(reward.parts):
            names = known.get(part.rule or "") if known is not None else None
            for option in part.options if names is not None else ():
                if option not in names:
                    yield Finding(
                        path=("rewards", label, "parts", index, "options", option),
                        message=f"`{part.rule}` has no option `{option}`",
                        reason=did_you_mean(option, names),
                        allowed=tuple(sorted(names)),
                        at_key=True,
                    )


def data_empty(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if not recipe.data.train:
        yield Finding(path=("data", "train"), message="has no set", reason="there is nothing to train on", at_key=True)


def data_source(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for here, source in sources(recipe):
        if source.path is None and source.python is None:
            yield Finding(path=here, message="needs `path` or `python`", reads=((*here, "path"), (*here, "python")), at_key=True)
        if source.path is not None and source.python is not None:
            yield Finding(path=(*here, "python"), message="`path` and `python` exclude each other", reason="write them as two sets")


def source_names(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    names = [source.name or f"train{index or ''}" for index, source in enumerate(recipe.data.train)]
    for index, source in enumerate(recipe.data.train):
        others = [other for other, name in enumerate(names) if name == names[index] and other != index]
        if source.name is None or not others:
            continue
        if others[0] < index:
            yield Finding(path=("data", "train", index, "name"), message=f"a second set named `{source.name}`", reason="row ids would clash")
        elif (other := next((other for other in others if recipe.data.train[other].name is None), None)) is not None:
            message = f"`{source.name}` is what set {other + 1} is called, which has no name of its own"
            yield Finding(path=("data", "train", index, "name"), message=message, reason="row ids would clash")


def reference_pattern(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for here, source in sources(recipe):
        if source.extract_reference is None:
            continue
        path = (*here, "extract_reference")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a later Python may read differently works today
                groups = re.compile(source.extract_reference).groups
        except (re.error, OverflowError, RecursionError) as error:
            yield Finding(path=path, message=f"not a regular expression: {error}", hint="single quotes keep backslashes as they are")
            continue
        if groups != 1:
            yield Finding(path=path, message=f"needs one group in parentheses, has {groups}", reason="the reference is what the group finds")


def label_without_reward(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for here, source in sources(recipe):
        own = here[1] == "eval" and recipe.eval.rewards is not None
        rewards, where = (recipe.eval.rewards or {}, "eval.rewards") if own else (recipe.rewards, "rewards")
        if source.columns.label is not None or not rewards:
            continue  # the rows say which; a scan of the data knows
        label = source.label or "default"
        if label not in rewards:
            written = source.label is not None
            yield Finding(
                path=(*here, "label") if written else here,
                message=f"no entry `{label}` in {where}" if written else f"rows without a label need an entry `default` in {where}",
                reason=did_you_mean(label, tuple(rewards)) if written else None,
                allowed=tuple(rewards) if written else (),
                hint=None if written else f"set `label`, for example `label: {next(iter(rewards))}`",
                reads=(("eval", "rewards") if own else ("rewards",), (*here, "label"), (*here, "columns")),
                at_key=not written,
            )
