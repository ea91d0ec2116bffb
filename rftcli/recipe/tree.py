"""YAML text to a tree that still knows what was written and where: source text, quotes, line and column of every key and value.

Nothing is resolved here: `no`, `1e-6` and `012` stay the characters they are until a reader knows what its key wants. Anchors, aliases and merge
keys work; their expansion is bounded. Refused: duplicate keys, tags, keys that are not text, several documents, anything but UTF-8.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml import events as ev

from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Place, Problem, Source

MAX_CHARACTERS = 1_000_000
"""A recipe is written by hand; a larger file is data in the wrong place."""
MAX_VALUES = 50_000
"""Values of a tree after aliases and merge keys are expanded: far above any recipe, far below what an alias bomb wants."""
MAX_DEPTH = 60
NULLS = frozenset({"", "~", "null", "Null", "NULL"})

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")
_HINTS = {
    "mapping values are not allowed": "put quotes round a value that holds `: `",
    "did not find expected key": "check the indentation of this line and the ones above",
    "did not find expected '-' indicator": "check the indentation of this line and the ones above",
    "could not find expected ':'": "is a `:` missing, or a bracket or quote left open above?",
    "cannot start any token": "put quotes round a value that starts with `@`, `%` or a backquote",
    "unexpected end of stream": "a quote is left open",
    "did not find expected ',' or": "a bracket is left open, or a comma is missing",
}
"""Part of the YAML library's message -> what usually helps."""


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """`plain`: written without quotes, so that it may be a number, a truth value or null."""

    text: str
    plain: bool
    place: Place
    size: int = 1
    depth: int = 0

    @property
    def is_null(self) -> bool:
        return self.plain and self.text in NULLS


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    items: tuple[Node, ...]
    place: Place
    size: int = 1
    """Values in it once aliases are expanded, itself included."""
    depth: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    entries: dict[str, Entry]
    place: Place
    size: int = 1
    depth: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A value and where its key stands."""

    key: Place
    value: Node


Node = Scalar | Sequence | Mapping


class YamlFault(Exception):
    """The text cannot be read any further; carries the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def read_source(path: Path, name: str) -> Source:
    """The text of a file, shown as `name`. Raises OSError, or YamlFault if it is no recipe-sized UTF-8 text."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for, and could be read only once
        raise YamlFault(_problem(f"`{name}` is no regular file", None, hint="write the recipe into a file and give its path"))
    with path.open("rb") as file:
        data = file.read(4 * MAX_CHARACTERS + 1)
    if len(data) > 4 * MAX_CHARACTERS:
        raise YamlFault(_problem(f"`{name}` is longer than {MAX_CHARACTERS:,} characters", None, hint="put data into a file of its own"))
    return decode(data, name, os.path.normpath(path.parent.absolute()))


def decode(data: bytes, name: str, base: str) -> Source:
    """The text of a file, without a byte-order mark. Raises YamlFault if it is not UTF-8."""
    try:
        return Source(name, data.decode("utf-8-sig"), base)
    except UnicodeDecodeError as error:
        source = Source(name, data.decode("utf-8-sig", errors="replace"), base)
        line = data.count(b"\n", 0, error.start) + 1
        column = len(data[data.rfind(b"\n", 0, error.start) + 1 : error.start].decode("utf-8", errors="replace")) + 1
        place = Place(source=source, line=line, column=column, length=1)
        problem = _problem("not UTF-8 text", place, label=f"byte 0x{data[error.start]:02x}", hint="save the file as UTF-8")
        raise YamlFault(problem) from error


def compose(source: Source, problems: list[Problem], start: int = 0, path: KeyPath = ()) -> Node | None:
    """The tree of one YAML document; None if there is none. `start`: characters of the source's first line that come before the YAML. `path`:
    where in a recipe the document stands.

    Duplicate keys and tags are added to `problems` and passed over. Raises YamlFault where reading cannot go on.
    """
    if len(source.text) > MAX_CHARACTERS:
        raise YamlFault(_problem(f"longer than {MAX_CHARACTERS:,} characters", None, hint="put data into a file of its own"))
    found = _UNPRINTABLE.search(source.text, start)
    if found:
        before = source.text[: found.start()]
        line = len(Source("", before, "").lines)
        place = Place(source=source, line=line, column=len(Source("", before, "").lines[-1]) + 1, length=1)
        raise YamlFault(
            _problem(f"character U+{ord(found[0]):04X} is not allowed", place, hint="delete it, or write it as an escape in double quotes")
        )
    return _Composer(source, problems, start).document(path)


def _problem(message: str, place: Place | None, *, label: str | None = None, hint: str | None = None, path: str = "", code: str = "yaml") -> Problem:
    return Problem(code=code, path=path, message=message, place=place, label=label, hint=hint)


class _Composer:
    """Builds nodes from the parser's events. One use."""

    def __init__(self, source: Source, problems: list[Problem], start: int) -> None:
        self.source = source
        self.problems = problems
        self.start = start
        self.anchors: dict[str, Node | None] = {}
        self.merged = 0
        self.events: Iterator[ev.Event] = yaml.parse(source.text[start:], Loader=_LOADER)

    def document(self, path: KeyPath) -> Node | None:
        root = None
        documents = 0
        while (event := self._next()) is not None:
            if isinstance(event, ev.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise YamlFault(_problem("a second document starts here", self._place(event), hint="a recipe is one document: remove `---`"))
                root = self._node(self._expect(), path)
                if root.size > MAX_VALUES:
                    raise YamlFault(_problem(f"aliases expand to more than {MAX_VALUES:,} values", None))
        return root

    def _next(self) -> ev.Event | None:
        try:
            return next(self.events, None)
        except yaml.MarkedYAMLError as error:
            raise YamlFault(self._syntax(error)) from error
        except yaml.YAMLError as error:
            raise YamlFault(_problem(f"not YAML: {error}".splitlines()[0], None)) from error

    def _expect(self) -> ev.Event:
        event = self._next()
        assert event is not None, "the parser ended inside a document"
        return event

    def _syntax(self, error: yaml.MarkedYAMLError) -> Problem:
        message = str(error.problem or error.context)
        at_end = "end of stream" in message and error.context_mark is not None
        mark = error.context_mark if at_end else error.problem_mark or error.context_mark  # an open quote: where it was opened
        place = None if mark is None else self._inside(self._at(mark.line, mark.column, 1))
        if place is not None and place.text[: place.column].strip() == "" and "\t" in place.text[: place.column]:
            return _problem("a tab in the indentation", place, hint="indent with spaces")
        hint = next((hint for part, hint in _HINTS.items() if part in message), None)
        if place is not None and "${" in place.text:
            hint = "put quotes round `${...}` where it stands inside brackets or braces"
        return _problem(f"not YAML: {message}", place, label=None if error.problem is None else error.context, hint=hint)

    def _inside(self, place: Place) -> Place:
        """`place`, or the end of the last line that says something if there is nothing at and after it."""
        lines = self.source.lines
        if place.text[place.column - 1 :].strip() or any(line.strip() for line in lines[place.line :]):
            return place
        line = max((number for number in range(min(place.line, len(lines))) if lines[number].strip()), default=0)
        return Place(source=self.source, line=line + 1, column=len(lines[line].rstrip()) + 1, length=1)

    def _at(self, line: int, column: int, length: int) -> Place:
        return Place(source=self.source, line=line + 1, column=column + 1 + (self.start if line == 0 else 0), length=length)

    def _place(self, event: ev.Event) -> Place:
        begin, end = event.start_mark, event.end_mark
        place = self._at(begin.line, begin.column, 1)
        length = end.column - begin.column if end.line == begin.line else len(place.text) - place.column + 1
        return Place(source=self.source, line=place.line, column=place.column, length=max(0, length))

    def _node(self, event: ev.Event, path: KeyPath) -> Node:
        if len(path) > MAX_DEPTH:
            raise YamlFault(_problem(f"nested more than {MAX_DEPTH} deep", self._place(event)))
        if isinstance(event, ev.AliasEvent):
            known = self.anchors.get(event.anchor)
            if known is None:
                inside = event.anchor in self.anchors
                message = f"alias `*{event.anchor}` stands inside its own anchor" if inside else f"no anchor `&{event.anchor}` above"
                raise YamlFault(_problem(message, self._place(event), path=format_path(path)))
            return known
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        node = self._untagged(event, path)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def _untagged(self, event: ev.Event, path: KeyPath) -> Node:
        tag = event.tag
        text_tag = tag == "tag:yaml.org,2002:str" and isinstance(event, ev.ScalarEvent)
        if tag is not None and not text_tag:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            problem = _problem(f"tag `{shown}` is not allowed", self._place(event), path=format_path(path), hint="write the value without a tag")
            self.problems.append(problem)
        if isinstance(event, ev.ScalarEvent):
            return Scalar(event.value, event.style in (None, "") and not text_tag, self._place(event))
        if isinstance(event, ev.SequenceStartEvent):
            return self._sequence(event, path)
        assert isinstance(event, ev.MappingStartEvent)
        return self._mapping(event, path)

    def _sequence(self, start: ev.SequenceStartEvent, path: KeyPath) -> Sequence:
        items: list[Node] = []
        while not isinstance(event := self._expect(), ev.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items))))
        return Sequence(tuple(items), self._span(start, event), *self._extent(items, start))

    def _mapping(self, start: ev.MappingStartEvent, path: KeyPath) -> Mapping:
        entries: dict[str, Entry] = {}
        inherited: list[Mapping] = []
        while not isinstance(event := self._expect(), ev.MappingEndEvent):
            key = self._node(event, path)
            place = self._place(event)
            if not isinstance(key, Scalar):
                raise YamlFault(_problem("a key must be plain text", place, path=format_path(path)))
            if key.text == "<<" and key.plain:
                inherited += self._merge_values(self._node(self._expect(), path), place, path)
                continue
            value = self._node(self._expect(), (*path, key.text))
            if key.text in entries:
                first = entries[key.text].key
                label = f"first written in line {first.line}"
                self.problems.append(_problem(f"duplicate key `{key.text}`", place, label=label, path=format_path(path), code="duplicate-key"))
            elif not key.text:
                self.problems.append(_problem("a key is missing in front of `:`", place, path=format_path(path)))
            else:
                entries[key.text] = Entry(place, value)
        for mapping in inherited:
            for name, entry in mapping.entries.items():
                entries.setdefault(name, entry)
        return Mapping(entries, self._span(start, event), *self._extent([entry.value for entry in entries.values()], start))

    def _extent(self, children: list[Node], start: ev.Event) -> tuple[int, int]:
        """(size, depth) of a collection of `children`."""
        size, depth = 1 + sum(child.size for child in children), 1 + max((child.depth for child in children), default=0)
        if depth > MAX_DEPTH:
            raise YamlFault(_problem(f"nested more than {MAX_DEPTH} deep", self._place(start)))
        return size, depth

    def _merge_values(self, node: Node, place: Place, path: KeyPath) -> list[Mapping]:
        """The mappings behind `<<`, earlier ones first to count."""
        mappings = [node] if isinstance(node, Mapping) else list(node.items) if isinstance(node, Sequence) else []
        found = [item for item in mappings if isinstance(item, Mapping)]
        if not found or len(found) != len(mappings):
            self.problems.append(_problem("`<<` takes a mapping or a list of mappings", place, path=format_path(path)))
        self.merged += sum(len(item.entries) for item in found)
        if self.merged > MAX_VALUES:
            raise YamlFault(_problem(f"merge keys expand to more than {MAX_VALUES:,} values", place))
        return found

    def _span(self, start: ev.Event, end: ev.Event) -> Place:
        """From bracket to bracket for a flow collection of one line; else the first line's rest."""
        place = self._at(start.start_mark.line, start.start_mark.column, 1)
        same_line = end.end_mark.line == start.start_mark.line
        length = end.end_mark.column - start.start_mark.column if same_line else len(place.text.rstrip()) - place.column + 1
        return Place(source=place.source, line=place.line, column=place.column, length=max(0, length))


def find(root: Node, path: KeyPath) -> tuple[int, Place, Node]:
    """(how many pieces of `path` exist, place of the last key of those, its value). Forgiving: "0" may be an index, and a list of one its item."""
    top = root.place
    node, key, used = root, Place(source=top.source, line=top.line, column=top.column, length=0), 0
    for piece in path:
        if isinstance(node, Sequence) and len(node.items) == 1 and isinstance(piece, str) and not piece.isdecimal():
            node = node.items[0]
        if isinstance(node, Mapping) and str(piece) in node.entries:
            key, node = node.entries[str(piece)].key, node.entries[str(piece)].value
        elif isinstance(node, Sequence) and str(piece).isdecimal() and int(piece) < len(node.items):
            node = node.items[int(piece)]
            key = node.place
        else:
            break
        used += 1
    return used, key, node
