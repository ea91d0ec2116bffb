"""Frozen dataclasses to JSON and back, by their type hints. For the plan and for the state a run keeps on disk; events have their own form.

Leaves out versioning and unions of two dataclasses: a field is a scalar, an enum, a tuple, a mapping, a dataclass, or one of these or None.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def to_data(value: Any) -> Any:
    """Plain lists, dicts and scalars that `json.dumps` takes as they are."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_data(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_data(item) for item in value]
    return value


def from_data(cls: type[T], data: Any) -> T:
    """The dataclass `cls` from what `to_data` gave. Raises ValueError naming the field that does not fit."""
    return typing.cast(T, _read(cls, data, cls.__name__))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _read(hint: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        choices = [item for item in typing.get_args(hint) if item is not type(None)]
        return _read(choices[0], data, where) if len(choices) == 1 else data
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(data, Mapping):
            raise ValueError(f"{where}: expected a mapping, got {type(data).__name__}")
        known = {item.name: item for item in dataclasses.fields(hint)}
        unknown = sorted(set(data) - set(known))
        required = {n for n, item in known.items() if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING}
        missing = sorted(required - set(data))
        if unknown or missing:
            raise ValueError(f"{where}: unknown fields {unknown}, missing fields {missing}")
        hints = _hints(hint)
        return hint(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in data.items()})
    if origin is tuple:
        _expect(data, (list, tuple), "a list", where)
        arguments = typing.get_args(hint)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        if len(arguments) != len(data):
            raise ValueError(f"{where}: expected {len(arguments)} values, got {len(data)}")
        return tuple(_read(item_hint, item, f"{where}[{i}]") for i, (item_hint, item) in enumerate(zip(arguments, data, strict=True)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _expect(data, (Mapping,), "a mapping", where)
        value_hint = typing.get_args(hint)[1]
        return {key: _read(value_hint, item, f"{where}.{key}") for key, item in data.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(data)
    if hint is float:
        return float(_expect(data, (int, float), "a number", where))
    if hint in _SCALARS:
        return _expect(data, (hint,), _SCALARS[hint], where)
    return data


_SCALARS: dict[Any, str] = {str: "text", int: "an integer", bool: "true or false"}


def _expect(data: Any, kinds: tuple[type, ...], words: str, where: str) -> Any:
    """`data`, which is one of `kinds`; a truth value is no number."""
    if not isinstance(data, kinds) or (isinstance(data, bool) and bool not in kinds):
        raise ValueError(f"{where}: expected {words}, got {'null' if data is None else type(data).__name__}")
    return data
