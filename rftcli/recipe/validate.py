"""Read values to a `Recipe`: pydantic checks ranges, lengths, patterns and required keys; its findings become problems at their place.

A recipe with problems is still built as far as it goes, with the faulty keys left out, so that rules across keys can speak in the same breath.
"""

from __future__ import annotations

from collections.abc import Mapping as AnyMapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rftcli.recipe.kinds import Kind, fields_of, show_number, topic
from rftcli.recipe.paths import KeyPath, format_path, related
from rftcli.recipe.problems import Problem
from rftcli.recipe.read import Reader
from rftcli.recipe.sections import Recipe, Section
from rftcli.recipe.tree import Node, Scalar, find

_TYPE_ERRORS = ("literal_error", "bool_type", "int_type", "float_type", "string_type", "none_required", "model_type", "dict_type")
"""What the alternatives of a union say that were never meant."""


def validate(values: dict[str, Any], root: Node, reader: Reader) -> Recipe | None:
    """The recipe of `values`, with what is wrong added to `reader.problems` and left out; None if nothing can be built."""
    _add_sections(Recipe, values)
    for _ in range(4):  # a key that is taken out may be a required one, whose stand-in makes the next round
        try:
            return Recipe.model_validate(values)
        except ValidationError as error:
            findings: dict[KeyPath, AnyMapping[str, Any]] = {}
            for item in error.errors(include_url=False):
                path = _path(item["loc"], values)
                if path not in findings or findings[path]["type"] in _TYPE_ERRORS:
                    findings[path] = item
        for path in [path for path, item in findings.items() if item["type"] in _TYPE_ERRORS]:
            if any(other != path and other[: len(path)] == path for other in findings):  # another alternative was meant, and has a fault of its own
                del findings[path]
        for path, item in findings.items():
            if item["type"] == "missing":
                _report_missing(path, root, reader)
                _put(values, path, _stand_in(path))
            else:
                _report(path, item, root, reader)
                _take_out(values, path)
    return None


def _add_sections(section: type[BaseModel], values: dict[str, Any]) -> None:
    """An empty section for each that may be left out and is: built along with the others, where a default would need a schema of its own."""
    for name, info in section.model_fields.items():
        made, key = info.default_factory, info.alias or name
        if isinstance(made, type) and issubclass(made, Section) and isinstance(inner := values.setdefault(key, {}), dict):
            _add_sections(made, inner)


def _path(loc: tuple[str | int, ...], values: Any) -> KeyPath:
    """The path of a finding: pydantic's own, without its marks for alternatives of a union."""
    path: list[str | int] = []
    loc = tuple(piece for piece in loc if piece != "[key]" and not str(piece).startswith("literal["))
    for number, piece in enumerate(loc):
        known = piece in values if isinstance(values, dict) else isinstance(piece, int) and isinstance(values, tuple) and piece < len(values)
        if known:
            path.append(piece)
            values = values[piece]
        elif isinstance(values, dict) and number == len(loc) - 1 and isinstance(piece, str):
            path.append(piece)  # a missing key
    return tuple(path)


def _report_missing(path: KeyPath, root: Node, reader: Reader) -> None:
    if any(related(path, other) for other in reader.doubtful):
        return
    used, key, _ = find(root, path)
    reader.doubtful.add(path)
    reader.problems.append(
        Problem(
            code="missing-key",
            path=format_path(path),
            message=f"`{path[-1]}` is needed",
            place=key,
            label="in this section" if used else "at the top level",
            hint=f"`rft explain {topic(path)}`",
        )
    )


def _report(path: KeyPath, item: AnyMapping[str, Any], root: Node, reader: Reader) -> None:
    used, key, node = find(root, path)
    in_key = item["loc"][-1] == "[key]"
    place = node.place if isinstance(node, Scalar) and used == len(path) and node.place.length and not in_key else key
    got = node.text if isinstance(node, Scalar) and used == len(path) and "${" not in node.text and not in_key else str(item["input"])
    message, label = _words(item, f"`{got}`")
    reader.doubtful.add(path)
    reader.problems.append(Problem(code="wrong-value", path=format_path(path), message=message, place=place, label=label))


def _words(item: AnyMapping[str, Any], shown: str) -> tuple[str, str | None]:
    """(message, what to say behind the caret) for one of pydantic's findings. `shown`: the value as it was written."""
    limits, kind = item.get("ctx", {}), item["type"]
    if kind in _BOUNDS:
        limit = next(iter(limits.values()))
        return f"must be {_BOUNDS[kind]} {show_number(limit)}, got {shown}", None
    if kind == "string_too_short":
        return "must not be empty", None
    if kind == "string_pattern_mismatch":
        if "https?" in limits["pattern"]:
            return f"must be an address that starts with `http://` or `https://`, got {shown}", None
        if ":" in limits["pattern"]:
            return f"must look like `module.path:function`, got {shown}", None
        without = "`/`" if shown.isprintable() else "control characters"
        return f"must be a file name without {without}, got {shown}", "it names a directory or a file of the run"
    return str(item["msg"]), None


_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}


def _take_out(values: dict[str, Any], path: KeyPath) -> None:
    """Remove the nearest key at or above `path`."""
    holder: Any = values
    owner, name = values, path[0]
    for piece in path:
        if isinstance(holder, dict):
            owner, name = holder, piece
        holder = holder[piece] if not isinstance(holder, dict) or piece in holder else None
    owner.pop(name, None)


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    holder: Any = values
    for piece in path[:-1]:
        holder = holder[piece]
    holder[path[-1]] = value


def _stand_in(path: KeyPath) -> Any:
    """Something valid for a required key that is missing. No rule reads it: its path is in `reader.doubtful`."""
    kind = Kind(section=Recipe)
    for piece in path:
        if kind.section is not None:
            kind = fields_of(kind.section)[str(piece)]
        else:
            kind = kind.items or kind.values or kind
    return _smallest(kind)


def _smallest(kind: Kind) -> Any:
    if kind.section is not None:
        return _required(kind.section)
    if kind.items is not None:
        return ()
    if kind.integer or kind.number:
        return 1
    if kind.choices and not kind.text:
        return kind.choices[0]
    return {} if kind.values is not None else "a:b"  # a target too


def _required(section: type[BaseModel]) -> dict[str, Any]:
    assert issubclass(section, Section)
    kinds = fields_of(section)
    names = [info.alias or name for name, info in section.model_fields.items() if info.is_required()]
    return {name: _smallest(kinds[name]) for name in names}
