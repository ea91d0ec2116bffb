"""Dataclasses go through JSON and come back equal; what does not fit is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest

from rftcli.codec import from_data, to_data


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Inner:
    weight: float
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str | None
    inner: Inner
    maybe: Inner | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    table: Mapping[str, tuple[Inner, ...]] = field(default_factory=dict)
    anything: Mapping[str, Any] = field(default_factory=dict)
    colour: Colour = Colour.RED


def test_round_trip() -> None:
    value = Outer(
        name=None, inner=Inner(weight=1.5, tags=("a",)), maybe=Inner(weight=2.0), table={"x": (Inner(weight=0.0),)}, anything={"k": [1, {"z": None}]}
    )
    assert from_data(Outer, to_data(value)) == value


def test_whole_numbers_become_floats() -> None:
    read = from_data(Inner, {"weight": 2})
    assert read.weight == 2.0 and isinstance(read.weight, float)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"weight": 1.0, "wieght": 2}, "wieght"),
        ({}, "missing fields ['weight']"),
        ([], "expected a mapping"),
        ({"weight": None}, "Inner.weight: expected a number, got null"),
        ({"weight": "1"}, "Inner.weight: expected a number, got str"),
        ({"weight": True}, "Inner.weight: expected a number, got bool"),
        ({"weight": 1, "tags": "ab"}, "Inner.tags: expected a list, got str"),
        ({"weight": 1, "tags": ["a", 2]}, "Inner.tags[1]: expected text, got int"),
    ],
)
def test_what_does_not_fit_is_named(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        from_data(Inner, data)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pair", [1.0], "Outer.pair: expected 2 values, got 1"),
        ("table", [], "Outer.table: expected a mapping, got list"),
        ("name", 3, "Outer.name: expected text, got int"),
        ("colour", "blue", "'blue' is not a valid Colour"),
    ],
)
def test_what_does_not_fit_deeper_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        from_data(Outer, {"name": None, "inner": {"weight": 1}, field: value})
