"""The language of recipes for machines: a JSON schema for editors, and a recipe written out whole.

What is left out: reading (`load`), and pages for people (`explain`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import yaml
from pydantic.fields import FieldInfo

from rftcli.recipe.kinds import Kind, fields_of
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.scalars import Misread, read_untyped
from rftcli.recipe.sections import Recipe

if TYPE_CHECKING:
    from rftcli.recipe.load import LoadedRecipe

COMMENT_COLUMN = 60
"""Where comments with origins start, if the line is not longer."""
_SIMPLE = re.compile(r"[A-Za-z_/.$][\w/.\-+$]*( [\w/.\-+]+)*\Z")
_REFERENCED = re.compile(r"[^\s'\"#&*!|>%@`{}\[\],:?-][^\s'\"#,]*\Z")
"""Text with `${VAR}` that stays as it is without quotes."""


def json_schema(rules: Collection[str] = ()) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe file, with descriptions; for editors: `# yaml-language-server: $schema=recipe.schema.json`.

    Both short forms are in it: a list of parts as a reward entry, and a single mapping as `data.train`. Needed keys are needed only without
    `extends`, which may bring them. `rules`: names of the reward rules; without them any name passes.
    """
    schema = Recipe.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    rewards = schema["properties"]["rewards"]
    parts = {"type": "array", "items": {"$ref": "#/$defs/RewardPart"}}
    rewards["additionalProperties"] = {"anyOf": [rewards["additionalProperties"], parts]}
    own = definitions["Eval"]["properties"]["rewards"]["anyOf"][0]
    own["additionalProperties"] = rewards["additionalProperties"]
    train = definitions["Data"]["properties"]["train"]
    definitions["Data"]["properties"]["train"] = {
        "description": train["description"],
        "anyOf": [{"$ref": "#/$defs/TrainSource"}, {"type": "array", "items": train["items"]}],
    }
    extends = schema["properties"]["extends"]
    schema["properties"]["extends"] = {
        "description": extends["description"],
        "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": extends["items"]}],
    }
    for section in (schema, *definitions.values()):
        section.pop("required", None)
    schema |= {"if": {"required": ["extends"]}, "else": _needed(Kind(section=Recipe))}
    if rules:
        definitions["RewardPart"]["properties"]["rule"]["anyOf"][0]["enum"] = sorted(rules)
    _drop_titles(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rft recipe", **schema}


def _needed(kind: Kind) -> dict[str, Any]:
    """The part of a schema that says which keys are needed in a mapping, and in those inside it. Items of lists need none."""
    if kind.section is None:
        inner = {} if kind.values is None else _needed(kind.values)
        return {"additionalProperties": inner} if inner else {}
    names = [info.alias or name for name, info in kind.section.model_fields.items() if info.is_required()]
    below = {name: found for name, inner in fields_of(kind.section).items() if (found := _needed(inner))}
    return ({"required": names} if names else {}) | ({"properties": below} if below else {})


def _drop_titles(node: Any) -> None:
    """Pydantic's titles repeat the names of keys; a key that is itself called `title` is left alone, since its value is a mapping."""
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        for value in node.values():
            _drop_titles(value)
    elif isinstance(node, list):
        for value in node:
            _drop_titles(value)


def resolved_yaml(loaded: LoadedRecipe, origins: bool = False) -> str:
    """The whole recipe as YAML, defaults included, `${VAR}` unexpanded; reading it gives the same recipe. `extends` is merged in and left out.

    `origins`: a comment behind every value says which file and line, which `--set`, or the default, it comes from.
    """
    values = loaded.recipe.model_dump(by_alias=True)
    del values["extends"]
    writer = _Writer(loaded, origins)
    writer.mapping(values, (), "")
    return "\n".join(writer.lines) + "\n"


class _Writer:
    """Block style, one value a line; short lists of scalars in brackets."""

    def __init__(self, loaded: LoadedRecipe, origins: bool) -> None:
        self.loaded = loaded
        self.origins = origins
        self.lines: list[str] = []

    def mapping(self, values: dict[str, Any], path: KeyPath, indent: str, first: str | None = None) -> None:
        """`first`: what stands in front of the first key instead of the indentation, `- ` in a list."""
        for number, (name, value) in enumerate(values.items()):
            front = first if first is not None and number == 0 else indent
            self.value(f"{front}{_key(name)}:", value, (*path, name), indent)

    def value(self, front: str, value: Any, path: KeyPath, indent: str) -> None:
        """`front`: the key with its colon, or the dash of a list."""
        if isinstance(value, dict) and value:
            if front.endswith("-"):
                self.mapping(value, path, f"{indent}  ", f"{front} ")
            else:
                self.lines.append(front)
                self.mapping(value, path, f"{indent}  ")
        elif isinstance(value, (list, tuple)) and value and not self._short(value, path):
            self.lines.append(front)
            for index, item in enumerate(value):
                self.value(f"{indent}  -", item, (*path, index), f"{indent}  ")
        else:
            self.lines.append(self._comment(f"{front} {self._scalar(value, path)}", path))

    def _short(self, values: list[Any] | tuple[Any, ...], path: KeyPath) -> bool:
        inside = any((*path, index) in self.loaded.unexpanded for index in range(len(values)))
        return not inside and not any(isinstance(item, (dict, list, tuple)) for item in values)

    def _scalar(self, value: Any, path: KeyPath) -> str:
        kept = self.loaded.unexpanded.get(path)
        if kept is None:
            return as_yaml(value)
        return kept.text if kept.plain and _REFERENCED.match(kept.text) else _quoted(kept.text)

    def _comment(self, line: str, path: KeyPath) -> str:
        if not self.origins:
            return line
        where = self.loaded.origin(format_path(path))
        if where.file is None:
            where = self.loaded.origin(format_path((*path, 0)))
        return f"{line:<{COMMENT_COLUMN}}  # {where}"


def default_of(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True, validated_data={})


def as_yaml(value: Any) -> str:
    """A scalar or a flat collection on one line, as a recipe would write it.

    >>> as_yaml(1e-6), as_yaml("no"), as_yaml([0.9, "a b"]), as_yaml(None)
    ('1.0e-06', '"no"', '[0.9, a b]', 'null')
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(as_yaml(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        value = value.replace("${", "$${")
        return value if _SIMPLE.match(value) and _reads_as_text(value) else _quoted(value)
    if isinstance(value, float):
        return repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")  # YAML 1.1 reads 1e-06 as text
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _key(name: Any) -> str:
    """References are expanded in values only."""
    return as_yaml(name).replace("$${", "${")


def _reads_as_text(text: str) -> bool:
    try:
        return read_untyped(text) == text
    except Misread:
        return False


def _quoted(text: str) -> str:
    dumped = yaml.safe_dump(text, default_style='"', width=2**31, allow_unicode=True)
    return dumped.removesuffix("\n")
