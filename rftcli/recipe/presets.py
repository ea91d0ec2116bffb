"""Presets: the settings of a paper as a file of `recipes/presets`, which recipes build on with `extends: [presets/NAME]`.

A preset sets keys of `algorithm`, `rollout`, `reward_shaping`, `batch` and `train`, never models, data or rewards. Its first lines are comments: the
paper, what it does, what is left to the user; a comment behind a key gives the reason for a value that is no number of the paper, or the default.

How to add one: a file there, and a row in `docs/algorithms/presets.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rftcli.errors import UsageError
from rftcli.recipe.layers import PRESETS, preset_names, shipped_recipes
from rftcli.recipe.methods import estimator_keys, loss_keys
from rftcli.recipe.names import closest, either
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.tree import Mapping, Node, Scalar, compose, read_source

PREFIX = "preset:"
"""What `rft explain` knows a preset by: `preset:dapo`."""
SECTIONS = ("rollout", "reward_shaping", "algorithm", "batch", "train")
"""Sections that a preset may set keys of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key of a preset."""

    path: KeyPath
    value: str
    """As it is written; `{}` for a section of defaults."""
    remark: str
    """The comment behind it; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A preset as it was written."""

    name: str
    header: tuple[str, ...]
    settings: tuple[Setting, ...]


def read_preset(name: str, shipped: Path | None = None) -> Preset:
    """The preset of a name. `shipped`: folder that `presets/` lies in. Raises UsageError with the nearest name if there is none."""
    folder = shipped or shipped_recipes()
    known = preset_names(folder)
    if name not in known:
        found = closest(name, known)
        hint = f"did you mean {either([f'{PREFIX}{item}' for item in found])}?" if found else f"presets: {', '.join(known)}"
        raise UsageError(f"there is no preset `{name}`", hint=hint)
    source = read_source(folder / PRESETS / f"{name}.yaml", f"{PRESETS}{name}.yaml")
    lines = source.text.splitlines()
    root = compose(source, [])
    assert root is not None, "a preset has keys"
    header = tuple(line.removeprefix("#").strip() for line in lines[: root.place.line - 1])
    return Preset(name=name, header=header, settings=tuple(_settings(root, (), lines)))


def _settings(node: Node, path: KeyPath, lines: list[str]) -> Iterator[Setting]:
    if isinstance(node, Mapping) and node.entries:
        for name, entry in node.entries.items():
            yield from _settings(entry.value, (*path, name), lines)
        return
    value = node.text if isinstance(node, Scalar) else "{}"
    yield Setting(path=path, value=value, remark=lines[node.place.line - 1].partition(" # ")[2])


def preset_page(name: str) -> str:
    """The page of `rft explain preset:NAME`: what the file's header says, its keys with their reasons, and how it is used."""
    preset = read_preset(name)
    rows = [(format_path(setting.path), setting.value, setting.remark) for setting in preset.settings]
    key, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    table = "\n".join(f"  {row[0]:<{key}}  {row[1]:<{value}}  {row[2]}".rstrip() for row in rows)
    text = "\n".join(f"  {line}" for line in preset.header)
    use = f"  used    extends: [{PRESETS}{name}, my-base.yaml], where what stands later wins\n  source  {shipped_recipes() / PRESETS / name}.yaml"
    return f"{PREFIX}{name}\n\n{text}\n\n{table}\n\n{_knobs(preset)}\n{use}\n"


def _knobs(preset: Preset) -> str:
    """What else there is to turn: the keys that its estimator and its loss read."""
    kinds = {setting.path[1]: setting.value for setting in preset.settings if setting.path[0] == "algorithm" and setting.path[-1] == "kind"}
    estimator, loss = kinds["advantage"], kinds["loss"]
    return f"  knobs   algorithm.advantage: {', '.join(estimator_keys(estimator))}\n          algorithm.loss: {', '.join(loss_keys(loss))}"
