"""The tree of a recipe to plain values, directed by what each key wants. Every misfit becomes a problem at its place; nothing is guessed.

What is left out: ranges and required keys (`validate`), rules across keys (`rules`).
"""

from __future__ import annotations

from collections.abc import Mapping as AnyMapping
from typing import Any

from pydantic import BaseModel

from rftcli.recipe import scalars
from rftcli.recipe.expand import ExpansionError, Unexpanded, expand, keep_references, resolve
from rftcli.recipe.finding import KnownRules
from rftcli.recipe.kinds import ANY_KEY, Kind, fields_of, null_has_a_meaning, pattern_of, sub_keys
from rftcli.recipe.names import Suggestion, did_you_mean, either, suggest_key
from rftcli.recipe.not_yet import key_reason, value_reason
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Place, Problem
from rftcli.recipe.sections.loss import LOSS_OPTIONS
from rftcli.recipe.tree import Entry, Mapping, Node, Scalar, Sequence

UNREADABLE = object()
"""Stands for a value with a problem; it is left out of what is read."""
LONGEST_QUOTE = 40
"""Characters of a wrong value that a message repeats."""


class Reader:
    """Reads trees and keeps what it found out on the way."""

    def __init__(self, env: AnyMapping[str, str], problems: list[Problem], known_rules: KnownRules | None = None) -> None:
        """`known_rules`: for options that stand beside their rule instead of in `options`."""
        self.known_rules = known_rules or {}
        self.env = env
        self.problems = problems
        self.doubtful: set[KeyPath] = set()
        """Paths whose value is not known because of a problem: wrong values, and keys that a misspelt one may have meant."""
        self.unexpanded: dict[KeyPath, Unexpanded] = {}
        """Values as they go to disk where they differ: with `${VAR}`."""

    def section(self, section: type[BaseModel], node: Mapping, path: KeyPath) -> dict[str, Any]:
        kinds = fields_of(section)
        values: dict[str, Any] = {}
        for name, entry in node.entries.items():
            if name not in kinds:
                self._unknown(name, entry, path, tuple(kinds), node)
                continue
            value = self.value(entry.value, kinds[name], (*path, name), entry.key)
            if value is not UNREADABLE:
                values[name] = value
        return values

    def value(self, node: Node, kind: Kind, path: KeyPath, key: Place) -> Any:
        """What `node` says, or UNREADABLE after noting why. `key`: where a problem of a whole list or mapping is shown."""
        if isinstance(node, Scalar):
            return self._scalar(node, kind, path, key)
        if isinstance(node, Sequence):
            return self._sequence(node, kind, path, key)
        if kind.section is not None:
            return self.section(kind.section, node, path)
        inner = kind.values or (kind if kind.anything else None)
        if inner is None:
            return self._wrong(node, kind, path, key)
        read = {name: self.value(entry.value, inner, (*path, name), entry.key) for name, entry in node.entries.items()}
        return {name: value for name, value in read.items() if value is not UNREADABLE}

    def _sequence(self, node: Sequence, kind: Kind, path: KeyPath, key: Place) -> Any:
        if kind.fixed is not None and len(node.items) != len(kind.fixed):
            return self._note(path, key, f"must be {kind.words()}, got {len(node.items)}")
        if kind.items is None and kind.fixed is None and not kind.anything:
            return self._wrong(node, kind, path, key)
        inner = kind.fixed or (kind.items or kind,) * len(node.items)
        read = [
            self.value(item, item_kind, (*path, index), item.place) for index, (item, item_kind) in enumerate(zip(node.items, inner, strict=True))
        ]
        if any(item is UNREADABLE for item in read):
            return UNREADABLE
        return read if kind.anything else tuple(read)

    def _scalar(self, node: Scalar, kind: Kind, path: KeyPath, key: Place) -> Any:
        if node.is_null:
            if not node.text and null_has_a_meaning(path):
                return self._note(path, key, "nothing stands here", hint="write `null` if that is meant, or delete this line", code="empty-value")
            if kind.null or kind.anything:
                return None
            if kind.section is not None:  # a section whose keys are all commented out
                return self.section(kind.section, Mapping({}, node.place), path)
            if kind.values is not None:
                return {}
            return self._wrong(node, kind, path, key)
        try:
            text = expand(node.text, self.env)
        except ExpansionError as error:
            return self._note(path, node.place, str(error), hint=error.hint, code="variable")
        if text != node.text:
            self.unexpanded[path] = Unexpanded(node.text, node.plain)
        return self._text(node, text, kind, path, key)

    def _text(self, node: Scalar, text: str, kind: Kind, path: KeyPath, key: Place) -> Any:
        """Try the kind's alternatives, the narrow ones first."""
        referenced = text != node.text
        plain = node.plain or (referenced and not kind.anything)
        label = None
        if text in kind.choices:
            return text
        readers = [scalars.read_bool] if kind.truth else []
        readers += [scalars.read_int] if kind.integer or any(isinstance(item, int) for item in kind.choices) else []
        readers += [scalars.read_float] if kind.number else []
        readers += [scalars.read_untyped] if kind.anything else []
        for read in readers if plain else []:
            try:
                value = read(text)
            except scalars.Misread as reason:
                label = label or reason.label
                continue
            if read is not scalars.read_int or kind.integer or value in kind.choices:
                return value
        if kind.text:
            return self._path(node, text, kind, path)
        if kind.anything and not plain:
            return text
        return self._wrong(node, kind, path, key, label, text)

    def _path(self, node: Scalar, text: str, kind: Kind, path: KeyPath) -> str:
        if kind.path is None:
            return text
        base = node.place.source.base
        resolved = resolve(text, kind.path, base, self.env)
        if text != node.text:
            self.unexpanded[path] = Unexpanded(keep_references(node.text, text, resolved, base), node.plain)
        return resolved

    def _unknown(self, name: str, entry: Entry, path: KeyPath, known: tuple[str, ...], node: Mapping) -> None:
        full = (*path, name)
        pattern = pattern_of(path)
        reason = key_reason((*pattern, name))
        if reason is not None:
            self._note(full, entry.key, f"`{format_path(full)}` is not yet supported", label=reason, code="not-yet-supported")
            return
        owners = self._owners_of(name, pattern, node)
        written = entry.value.text if isinstance(entry.value, Scalar) else "..."
        option = f"an option of {either(owners)}: `options: {{{name}: {written}}}`" if owners else None
        suggestion = suggest_key(pattern, name, known) if option is None else Suggestion(text=option)
        self.doubtful |= {_concrete(meant, path) for meant in suggestion.meant}
        self.problems.append(
            Problem(
                code="unknown-key",
                path=format_path(path),
                message=f"unknown key `{name}`",
                place=entry.key,
                label=suggestion.text,
                allowed=known,
            )
        )

    def _owners_of(self, name: str, pattern: tuple[str, ...], node: Mapping) -> list[str]:
        """The rule, or the losses, that have an option of this name, which stands beside them."""
        if pattern[-2:] == ("parts", ANY_KEY) and "rule" in node.entries:
            rule = node.entries["rule"].value
            return [rule.text] if isinstance(rule, Scalar) and name in self.known_rules.get(rule.text, ()) else []
        return [kind for kind, options in LOSS_OPTIONS.items() if name in options] if pattern == ("algorithm", "loss") else []

    def _wrong(self, node: Node, kind: Kind, path: KeyPath, key: Place, label: str | None = None, text: str | None = None) -> Any:
        """`node` is none of the things that `kind` takes."""
        place = node.place if isinstance(node, Scalar) and node.place.length else key
        word = text if text is not None else next(iter(node.entries), "") if isinstance(node, Mapping) else ""
        reason = value_reason(pattern_of(path), word)
        choices = tuple(str(item) for item in kind.choices)
        if reason is not None:
            return self._note(path, place, f"`{word}` is not yet supported", label=reason, allowed=choices, code="not-yet-supported")
        if choices and text is not None:
            label = label or _of_another_kind(text, pattern_of(path)) or did_you_mean(text, choices)
            if kind == Kind(choices=kind.choices):
                return self._note(path, place, f"unknown value `{_quote(text)}`", label=label, allowed=choices, code="unknown-value")
        got = _got(node, text, kind)
        return self._note(path, place, f"must be {kind.words()}, got {got}", label=label or _fix(node, kind, text), allowed=sub_keys(kind))

    def _note(
        self,
        path: KeyPath,
        place: Place,
        message: str,
        *,
        label: str | None = None,
        hint: str | None = None,
        allowed: tuple[str, ...] = (),
        code: str = "wrong-value",
    ) -> Any:
        self.doubtful.add(path)
        self.problems.append(Problem(code=code, path=format_path(path), message=message, place=place, label=label, allowed=allowed, hint=hint))
        return UNREADABLE


def _of_another_kind(text: str, pattern: tuple[str, ...]) -> str | None:
    """An estimator where a loss belongs, or a preset: names that papers give to a whole method."""
    from rftcli.recipe.layers import PRESETS, preset_names, shipped_recipes
    from rftcli.recipe.methods import FAMILIES, family_of, named  # only a recipe with a mistake needs the pages

    if family_of(pattern) is None:
        return None
    found = [FAMILIES[topic.partition(":")[0]].use(text) for topic in named(text)]
    found += [f"extends: [{PRESETS}{text}]"] if text in preset_names(shipped_recipes()) else []
    return f"`{text}` is something else: {either(found)}" if found else None


def to_write(node: Scalar, kind: Kind) -> str | None:
    """What to write instead of a scalar that is no value of its key, where it is plain to see."""
    return _fix(node, kind, node.text)


def _concrete(meant: tuple[str, ...], path: KeyPath) -> KeyPath:
    """The path of a meant key, as far as it is known: in the same section with its real indexes, elsewhere up to the first chosen name."""
    pattern = pattern_of(path)
    result: list[str | int] = []
    for number, piece in enumerate(meant):
        if number < len(path) and meant[: number + 1] == pattern[: number + 1]:
            result.append(path[number])
        elif piece == ANY_KEY:
            break
        else:
            result.append(piece)
    return tuple(result)


def _quote(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3] + "..."


def _got(node: Node, text: str | None, kind: Kind) -> str:
    if isinstance(node, Sequence):
        return "a list"
    if isinstance(node, Mapping):
        return "a mapping"
    if node.is_null:
        return "null" if node.text else "nothing"
    shown = f"`{_quote(text if text is not None else node.text)}`"
    quoted = not node.plain and text == node.text and not kind.section and not kind.values
    return f"the text {shown}" if quoted else shown


def _is_text(node: Scalar) -> bool:
    try:
        return bool(node.text) and (not node.plain or isinstance(scalars.read_untyped(node.text), str))
    except scalars.Misread:
        return False


def _in_braces(text: str) -> str:
    """As text is written between braces."""
    return "'" + text.replace("'", "''") + "'" if set(text) & set(",{}[]#:&*!|>'\"%@`") else text


def _fix(node: Node, kind: Kind, text: str | None) -> str | None:
    """What to write instead, where it is plain to see."""
    if isinstance(node, Mapping):
        return "put `- ` in front: a list of mappings" if kind.items is not None and kind.items.section else None
    if isinstance(node, Sequence):
        return None
    if node.is_null:
        return "put it in quotes if the text is meant" if kind.text and node.text else "leave the key out for its default"
    section = kind.section or (kind.items.section if kind.items is not None else None)
    if section is not None and "path" in fields_of(section) and _is_text(node):
        return f"did you mean `{{path: {_in_braces(node.text)}}}`?"
    if kind.section is not None and {"parts", "rule"} & set(fields_of(kind.section)) and _is_text(node):
        part = f"{{{'python' if ':' in node.text else 'rule'}: {_in_braces(node.text)}}}"
        return f"write `[{part}]`" if "parts" in fields_of(kind.section) else f"write `{part}`"
    if kind.section is not None and "kind" in fields_of(kind.section) and node.text in fields_of(kind.section)["kind"].choices:
        return f"write `{{kind: {node.text}}}`"
    if kind.items is not None and kind.items.section is None:
        return f"write `[{_quote(node.text)}]`"
    if kind.values is not None and kind.values.section is not None and "parts" in fields_of(kind.values.section) and _is_text(node):
        return f"write `{{default: [{{{'python' if ':' in node.text else 'rule'}: {_in_braces(node.text)}}}]}}`"
    if kind.section is not None and node.plain and text in scalars.TRUE:
        needed = [info.alias or name for name, info in kind.section.model_fields.items() if info.is_required()]
        return f"`{{{', '.join(f'{name}: ...' for name in needed)}}}` {'switches it on' if needed else 'takes the defaults'}"
    if not node.plain and text == node.text and (kind.number or kind.integer or kind.truth):
        return "write it without quotes"
    return None
