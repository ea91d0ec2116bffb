"""One layer of a recipe laid on another: mappings merge, lists replace, null removes (unless null is a value of the key: `kinds`). Each node keeps
the place it was written at.

Two shorthands become their long form here: a list in the place of a reward entry, and one mapping in the place of the list `data.train`.
"""

from __future__ import annotations

from rftcli.recipe.kinds import null_has_a_meaning
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Place, Problem, Source
from rftcli.recipe.tree import Entry, Mapping, Scalar, Sequence

DEFAULT = Source("default", "", "/")
"""Where a value stands that a shorthand leaves out: nowhere."""


def merge(base: Mapping, over: Mapping, path: KeyPath, problems: list[Problem]) -> Mapping:
    """`over` laid on `base`. `path`: where both stand."""
    entries = dict(base.entries)
    for name, entry in over.entries.items():
        below = entries.get(name)
        if below is None:
            entries[name] = entry
        elif isinstance(entry.value, Scalar) and entry.value.is_null:
            _refuse_empty(entry, below, (*path, name), problems)
            if null_has_a_meaning((*path, name)):
                entries[name] = entry
            else:
                del entries[name]
        elif isinstance(below.value, Mapping) and isinstance(entry.value, Mapping):
            entries[name] = Entry(entry.key, merge(below.value, entry.value, (*path, name), problems))
        else:
            entries[name] = entry
    return Mapping(entries, over.place)


def _refuse_empty(entry: Entry, below: Entry, path: KeyPath, problems: list[Problem]) -> None:
    """A bare `rollout:` over an inherited section is more likely an unfinished edit than a wish to remove it."""
    inherits = not (isinstance(below.value, Scalar) and below.value.is_null)
    if isinstance(entry.value, Scalar) and not entry.value.text and inherits:
        label = f"{below.key} wrote a value"
        hint = "write `null` to remove that, or delete this line"
        text = "nothing stands here"
        problems.append(Problem(code="empty-value", path=format_path(path), message=text, place=entry.key, label=label, hint=hint))


def long_rewards(root: Mapping) -> Mapping:
    """A list in the place of a reward entry is {combine: sum, parts: [...]}, also in `eval.rewards`. Before merging, so that a list replaces what it
    is laid on."""
    evaluation = root.entries.get("eval")
    if evaluation is not None and isinstance(evaluation.value, Mapping):
        root = Mapping({**root.entries, "eval": Entry(evaluation.key, _long_rewards(evaluation.value))}, root.place)
    return _long_rewards(root)


def _long_rewards(root: Mapping) -> Mapping:
    rewards = root.entries.get("rewards")
    if rewards is None or not isinstance(rewards.value, Mapping):
        return root
    entries: dict[str, Entry] = {}
    for label, entry in rewards.value.entries.items():
        if isinstance(entry.value, Sequence):
            combine = Entry(entry.key, Scalar("sum", True, Place(source=DEFAULT, line=1, column=1, length=0)))
            kept = Entry(entry.key, Scalar("false", True, Place(source=DEFAULT, line=1, column=1, length=0)))
            plain = {"combine": combine, "renormalise": kept, "parts": Entry(entry.key, entry.value)}
            entry = Entry(entry.key, Mapping(plain, entry.value.place))
        entries[label] = entry
    return Mapping({**root.entries, "rewards": Entry(rewards.key, Mapping(entries, rewards.value.place))}, root.place)


def single_source_as_list(root: Mapping) -> Mapping:
    """One mapping as `data.train` is a list of one. After merging, so that a child can change one key of its parent's only set."""
    data = root.entries.get("data")
    if data is None or not isinstance(data.value, Mapping) or "train" not in data.value.entries:
        return root
    if not isinstance(data.value.entries["train"].value, Mapping):
        return root
    return Mapping({**root.entries, "data": Entry(data.key, as_list(data.value, "train"))}, root.place)


def as_list(mapping: Mapping, name: str) -> Mapping:
    """`mapping` with the value of `name` in a list, unless it is one or null."""
    entry = mapping.entries[name]
    if isinstance(entry.value, Sequence) or (isinstance(entry.value, Scalar) and entry.value.is_null):
        return mapping
    return Mapping({**mapping.entries, name: Entry(entry.key, Sequence((entry.value,), entry.key))}, mapping.place)


def without(mapping: Mapping, name: str) -> Mapping:
    return Mapping({key: entry for key, entry in mapping.entries.items() if key != name}, mapping.place)
