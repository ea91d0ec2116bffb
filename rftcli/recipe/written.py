"""A recipe as it goes to disk: free text keeps its `${VAR}`, so that no value of the environment is written anywhere.

`written_recipe` gives the form that a plan is made of, `live_text` takes it back on the ranks, `written_values` is for output only. Numbers, truth
values and words of a fixed choice are decided when the plan is made and stand in it as they are; they are no place for secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rftcli.recipe.expand import expand
from rftcli.recipe.kinds import Kind, fields_of
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.scalars import read_untyped
from rftcli.recipe.sections import Recipe

if TYPE_CHECKING:
    from rftcli.recipe.load import LoadedRecipe

UNTYPED = "${}"
"""Only key of a mapping that stands for a value of an open section (`options`) which is no text: {"${}": "${COUNT}"}. `${}` is no name of a
variable, so it is nobody's own key."""


def escaped(text: str) -> str:
    """Text without references, so that `live_text` gives it back.

    >>> escaped("a ${B}")
    'a $${B}'
    """
    return text.replace("${", "$${")


def live_text(value: Any, env: Mapping[str, str]) -> Any:
    """Plain data in written form with every reference replaced. Raises `expand.ExpansionError` for a variable that is not set.

    >>> live_text({"a": ["${B}", "$${B}"], "n": {"${}": "${N}"}}, {"B": "b", "N": "3"})
    {'a': ['b', '${B}'], 'n': 3}
    """
    if isinstance(value, str):
        return expand(value, env)
    if isinstance(value, Mapping):
        if set(value) == {UNTYPED}:
            return read_untyped(expand(value[UNTYPED], env))
        return {name: live_text(item, env) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [live_text(item, env) for item in value]
    return value


def written_recipe(loaded: LoadedRecipe) -> Recipe:
    """The recipe with its free texts in written form: the references that were written, and `$${` for a literal `${`."""
    kind = Kind(section=Recipe)
    written = _written(loaded, loaded.recipe, kind, ())
    assert isinstance(written, Recipe)
    return written


def written_values(loaded: LoadedRecipe) -> dict[str, Any]:
    """All keys and values for people and programs to read: as JSON would have them, every value with a reference as it was written."""
    values = loaded.recipe.model_dump(mode="json", by_alias=True)

    def walk(value: Any, path: KeyPath) -> Any:
        if path in loaded.unexpanded:
            return loaded.unexpanded[path].text
        if isinstance(value, dict):
            return {name: walk(item, (*path, name)) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item, (*path, index)) for index, item in enumerate(value)]
        return value

    return {name: walk(value, (name,)) for name, value in values.items()}


def _written(loaded: LoadedRecipe, value: Any, kind: Kind, path: KeyPath) -> Any:
    if isinstance(value, BaseModel):
        section = type(value)
        kinds = fields_of(section)
        names = {name: info.alias or name for name, info in section.model_fields.items()}
        return value.model_copy(update={name: _written(loaded, getattr(value, name), kinds[key], (*path, key)) for name, key in names.items()})
    if isinstance(value, Mapping):
        inner = kind.values or kind
        return {name: _written(loaded, item, inner, (*path, name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        kinds_of_items = kind.fixed or (kind.items or kind,) * len(value)
        return type(value)(
            _written(loaded, item, inner, (*path, index)) for index, (item, inner) in enumerate(zip(value, kinds_of_items, strict=True))
        )
    kept = loaded.unexpanded.get(path)
    if kept is not None and kind.anything and not isinstance(value, str):
        return {UNTYPED: kept.text}
    if not isinstance(value, str) or value in kind.choices or (kind.path is not None and value == kind.path.word):
        return value
    return escaped(value) if kept is None else kept.text
