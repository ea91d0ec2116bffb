"""What a key wants, read once from the annotations of `sections`: the one bridge between pydantic's types, the reader, `explain` and suggestions.

`keys()` is the list of every key of the language, with patterns such as `data.eval.NAME.path` and `rewards.LABEL.parts[].weight`.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import PathText, Recipe

ANY_KEY = "*"
"""Piece of a pattern that stands for a name the person chose, or for an index."""
NAMES_OF_KEYS = {
    ("data", "eval"): "NAME", ("models", "scorers"): "NAME", ("rewards",): "LABEL", ("eval", "rewards"): "LABEL", ("rollout", "by_label"): "LABEL",
}  # fmt: skip
"""How the chosen names below a key are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The values a key takes: any of the alternatives that are set."""

    null: bool = False
    choices: tuple[str | int, ...] = ()
    truth: bool = False
    integer: bool = False
    number: bool = False
    text: bool = False
    path: PathText | None = None
    anything: bool = False
    items: Kind | None = None
    """Of a list of any length."""
    fixed: tuple[Kind, ...] | None = None
    """Of a list of exactly these."""
    values: Kind | None = None
    """Of a mapping with chosen names."""
    section: type[BaseModel] | None = None
    bounds: tuple[str, ...] = ()
    """Words such as `above 0`, for people."""

    def words(self) -> str:
        """`an integer or null`"""
        parts = [str(item) for item in self.choices]
        parts += ["true or false"] if self.truth else []
        parts += ["an integer"] if self.integer else []
        parts += ["a number"] if self.number else []
        parts += ["a path" if self.path is not None and self.path.kind != "template" else "text"] if self.text else []
        parts += ["any value"] if self.anything else []
        parts += [f"a list of {plural(self.items)}"] if self.items is not None else []
        parts += [f"a list of {len(self.fixed)} {plural(self.fixed[0])}"] if self.fixed else []
        parts += ["a mapping"] if self.section is not None or self.values is not None else []
        parts += ["null"] if self.null else []
        return ", ".join(parts[:-1]) + f" or {parts[-1]}" if len(parts) > 1 else parts[0]


def sub_keys(kind: Kind | None) -> tuple[str, ...]:
    """Keys of a section that takes nothing but a mapping (or null); empty for any other kind."""
    return tuple(fields_of(kind.section)) if kind is not None and kind.section is not None and is_mapping(kind) else ()


def is_mapping(kind: Kind) -> bool:
    """Whether nothing but a mapping (or null) may stand there."""
    return kind.words().removesuffix(" or null") == "a mapping"


def plural(kind: Kind) -> str:
    return "mappings" if kind.section else "integers" if kind.integer else "numbers" if kind.number else "texts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the language."""

    pieces: tuple[str, ...]
    kind: Kind
    info: FieldInfo = field(repr=False)

    @property
    def name(self) -> str:
        return self.pieces[-1]

    @property
    def pattern(self) -> str:
        """For people: `data.train[].path`."""
        return show_pattern(self.pieces)


def show_pattern(pieces: tuple[str, ...]) -> str:
    text = ""
    for number, piece in enumerate(pieces):
        if piece == ANY_KEY:
            name = NAMES_OF_KEYS.get(pieces[:number])
            text += f".{name}" if name else "[]"
        else:
            text += f".{piece}" if text else piece
    return text


def pattern_of(path: KeyPath) -> tuple[str, ...]:
    """The pattern a path belongs to: indexes and chosen names become `*`.

    >>> pattern_of(("data", "eval", "gsm8k", "path"))
    ('data', 'eval', '*', 'path')
    """
    pieces: list[str] = []
    for piece in path:
        chosen = isinstance(piece, int) or tuple(pieces) in NAMES_OF_KEYS
        pieces.append(ANY_KEY if chosen else piece)
    return tuple(pieces)


@cache
def fields_of(section: type[BaseModel]) -> dict[str, Kind]:
    """Key -> kind, in the order of the section."""
    return {info.alias or name: _kind(info.annotation, info.metadata) for name, info in section.model_fields.items()}


@cache
def keys() -> tuple[Key, ...]:
    """Every supported key, sections before what is in them."""
    found: list[Key] = []

    def walk(section: type[BaseModel], above: tuple[str, ...]) -> None:
        for name, info in section.model_fields.items():
            key = info.alias or name
            kind = fields_of(section)[key]
            found.append(Key(pieces=(*above, key), kind=kind, info=info))
            below, inner = (*above, key), kind
            if kind.items is not None or kind.values is not None:
                below, inner = (*below, ANY_KEY), kind.items or kind.values
            if inner is not None and inner.section is not None:
                walk(inner.section, below)

    walk(Recipe, ())
    return tuple(found)


@cache
def key_table() -> dict[tuple[str, ...], Key]:
    return {key.pieces: key for key in keys()}


def topic(path: KeyPath) -> str:
    """What `rft explain` is asked about a path: the nearest key at or above it, without the brackets that a shell would read.

    >>> topic(("rewards", "math", "parts", 0, "options", "befor"))
    'rewards.LABEL.parts.options'
    """
    pieces = pattern_of(path)
    while pieces and pieces not in key_table():
        pieces = pieces[:-1]
    return show_pattern(pieces).replace("[]", "")


def null_has_a_meaning(path: KeyPath) -> bool:
    """Whether null at this key says what its default does not. Elsewhere null takes a value back to the default.

    >>> null_has_a_meaning(("train", "max_grad_norm")), null_has_a_meaning(("train", "steps"))
    (True, False)
    """
    key = key_table().get(pattern_of(path))
    return key is not None and key.kind.null and key.info.default is not None


def _kind(annotation: Any, metadata: typing.Sequence[Any] = ()) -> Kind:
    parts = _alternatives(annotation, list(metadata))
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = (*merged.get(name, ()), *value) if name in ("choices", "bounds") else value
    return Kind(**merged)


def _alternatives(annotation: Any, metadata: list[Any]) -> list[dict[str, Any]]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner: list[Any] = []
        for item in arguments[1:]:
            inner += item.metadata if isinstance(item, FieldInfo) else [item]
        return _alternatives(arguments[0], metadata + inner)
    if origin in (typing.Union, types.UnionType):
        return [part for item in arguments for part in _alternatives(item, metadata)]
    if origin is Literal:
        return [{"choices": arguments}]
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return [{"items": _kind(arguments[0])}]
        return [{"fixed": tuple(_kind(item) for item in arguments)}]
    if origin is dict:
        return [{"values": _kind(arguments[1])}]
    if annotation is Any:
        return [{"anything": True}]
    if annotation is type(None):
        return [{"null": True}]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [{"section": annotation}]
    name = {bool: "truth", int: "integer", float: "number", str: "text"}[annotation]
    part: dict[str, Any] = {name: True, "bounds": _bounds(metadata)}
    paths = [item for item in metadata if isinstance(item, PathText)]
    return [part | {"path": paths[0]} if paths else part]


def _bounds(metadata: list[Any]) -> tuple[str, ...]:
    words = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}
    return tuple(f"{words[type(item)][0]} {show_number(getattr(item, words[type(item)][1]))}" for item in metadata if type(item) in words)


def show_number(value: int | float) -> str:
    """
    >>> show_number(2**63), show_number(1.0)
    ('9223372036854775808', '1')
    """
    return str(value) if isinstance(value, int) else f"{value:g}"
