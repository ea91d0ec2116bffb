"""From a data set's description to its rows: which column is what, checked for every row before anything heavy is loaded.

Nothing is skipped, guessed or filled in. A row that cannot be used ends the read with its place, the missing name and the names that are there,
and the count of such rows. Equal rows stay separate rows. What is left out: reading bytes (`files`), rendering (`prompts`), order (`source`).
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcli.data.answers import answer_column, split_turns
from rftcli.data.faults import Faults, kind_of
from rftcli.data.messages import BadPrompt, read_prompt, with_system
from rftcli.data.origin import open_records
from rftcli.data.spec import DEFAULT_LABEL, DataSpec
from rftcli.data.template import Template
from rftcli.data.where import RowProblem, Where
from rftcli.errors import UsageError

if TYPE_CHECKING:
    from rftcli.types import Message

INFERRED_REFERENCES = ("answer", "reference")
"""Where the reference is looked for if `columns.reference` does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One usable row of a set.

    >>> Row(source="gsm8k", index=0, place="train.jsonl:1", id="gsm8k:0", label="math", prompt="1+1?", reference="2", columns={}).index
    0
    """

    source: str
    index: int
    """0-based among the rows of the set."""
    place: str
    """Where a person finds it: `train.jsonl:12` (file and line) or `tasks.json row 12`."""
    id: str
    label: str
    prompt: str | tuple[Message, ...]
    reference: Any
    """None: the row has none."""
    columns: Mapping[str, Any]
    """The whole row as it was read."""


class _Unusable(Exception):
    """Why a row cannot be used; `args[1]` is a hint or None."""

    def __init__(self, problem: str, hint: str | None = None) -> None:
        super().__init__(problem, hint)


def spec_problems(spec: DataSpec) -> list[tuple[str, UsageError]]:
    """(key, what is wrong with it) of the small languages in a set's description, before any row is read."""
    found: list[tuple[str, UsageError]] = []
    for name, text, parse in (("where", spec.where, Where.parse), ("template", spec.template, Template.parse)):
        try:
            if text is not None:
                parse(text)
        except UsageError as error:
            found.append((name, error))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a set says about every row, made ready once. UsageError for an expression, a template or a pattern that is none."""

    spec: DataSpec
    pattern: re.Pattern[str] | None
    template: Template | None
    where: Where | None

    @classmethod
    def of(cls, spec: DataSpec) -> Reading:
        try:
            where = None if spec.where is None else Where.parse(spec.where)
            template = None if spec.template is None else Template.parse(spec.template)
        except UsageError as error:
            raise UsageError(f"data set `{spec.name}`: {error.message}", hint=error.hint) from error
        return cls(spec=spec, pattern=_pattern(spec), template=template, where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place between two rows of a set: how many records and how many usable rows come before it."""

    records: int = 0
    rows: int = 0


class RowReader:
    """The rows of a set one after the other, from the first on: what `where` lets pass, up to `spec.limit`. One use.

    Rows that cannot be used go into `faults`; whoever iterates raises them.
    """

    def __init__(self, spec: DataSpec, search_path: Sequence[Path] = (), start: Position | None = None) -> None:
        start = start or Position()
        self.faults = Faults(source=spec.name)
        self.num_records = start.records
        """Records of the set so far, whatever became of them."""
        self.num_rows = start.rows
        """Usable rows so far."""
        self.num_filtered = 0
        """Rows so far that `where` did not let pass."""
        self.ended = False
        """Whether the set was read to its end, or to its limit."""
        self._reading = Reading.of(spec)
        self._search_path = search_path

    @property
    def position(self) -> Position:
        """Where another reader goes on, between two rows."""
        return Position(records=self.num_records, rows=self.num_rows)

    def __iter__(self) -> Generator[Row]:
        spec = self._reading.spec
        inferred: dict[str, str] = {}  # column name -> first place
        with closing(open_records(spec, self._search_path, self.faults)) as records:
            for _ in itertools.islice(records, self.num_records):
                pass
            while spec.limit is None or self.num_rows + self.faults.count < spec.limit:
                item = next(records, None)
                if item is None:
                    break
                place, columns = item
                self.num_records += 1
                try:
                    if not self._passes(columns):
                        self.num_filtered += 1
                        continue
                    row = _row(self._reading, self.num_rows, place, columns)
                    _note_inferred(spec, columns, place, inferred)
                except (_Unusable, RowProblem) as problem:
                    self.faults.add(place, *problem.args)
                else:
                    self.num_rows += 1
                    yield row
        self.ended = True

    def _passes(self, columns: Mapping[str, Any]) -> bool:
        return self._reading.where is None or self._reading.where.keeps(columns)


@dataclass(frozen=True, kw_only=True)
class Table:
    """All rows of a set, or its first ones."""

    rows: list[Row]
    filtered: int
    """Rows that `where` did not let pass."""
    complete: bool
    """Read to the end of the set, or to its `limit`."""

    @cached_property
    def fingerprint(self) -> str:
        """As `fingerprint` of its rows."""
        return fingerprint(self.rows)


def read_table(spec: DataSpec, search_path: Sequence[Path] = (), first: int | None = None) -> Table:
    """All rows of a set, or those among its `first` ones; `spec.limit` is kept to in both cases.

    `search_path`: directories for a relative `path` and for the module of `python`; empty means the working directory and what is installed.
    UsageError with place and count if a row cannot be used, if two rows have the same id, or if there is no row at all.
    """
    if first is not None and spec.limit is None and spec.where is None:
        spec = replace(spec, limit=first)
        table = read_table(spec, search_path)
        return replace(table, complete=len(table.rows) < first)
    reader = RowReader(spec, search_path)
    rows: list[Row] = []
    with closing(iter(reader)) as found:
        for row in found:
            rows.append(row)
            if first is not None and reader.num_records >= first:
                break
    reader.faults.raise_if_any(len(rows) + reader.num_filtered)
    if not rows:
        why = f": `where: {spec.where}` lets none of {reader.num_filtered} rows pass" if reader.num_filtered else ""
        raise UsageError(f"data set `{spec.name}`: {spec.path or spec.python} has no rows{why}")
    _check_ids(spec, rows)
    return Table(rows=rows, filtered=reader.num_filtered, complete=reader.ended or (spec.limit is not None and len(rows) >= spec.limit))


def read_rows(spec: DataSpec, search_path: Sequence[Path] = (), first: int | None = None) -> list[Row]:
    """The rows of `read_table`."""
    return read_table(spec, search_path, first).rows


def fingerprint(rows: Sequence[Row]) -> str:
    """sha256 over the columns of the rows in their order, in hex. Names of columns and sets, labels and file formats do not enter beyond that."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row.columns, sort_keys=True).encode("ascii") + b"\n")
    return digest.hexdigest()


def _row(reading: Reading, index: int, place: str, columns: Mapping[str, Any]) -> Row:
    spec = reading.spec
    names = spec.columns
    label = _optional_text(columns, names.label, "label")
    row_id = _optional_text(columns, names.id, "id") or f"{spec.name}:{index}"
    return Row(
        source=spec.name,
        index=index,
        place=place,
        id=row_id,
        label=label or spec.label or DEFAULT_LABEL,
        prompt=_prompt(reading, columns),
        reference=_reference(spec, reading.pattern, columns),
        columns=columns,
    )


def _prompt(reading: Reading, columns: Mapping[str, Any]) -> str | tuple[Message, ...]:
    spec = reading.spec
    name = spec.columns.prompt or "prompt"
    try:
        value = _required(columns, name, "prompt") if reading.template is None else _filled(reading.template, name, columns)
        prompt = read_prompt(split_turns(value)[0] if spec.answers else value)
    except BadPrompt as problem:
        raise _Unusable(*problem.args) from problem
    if isinstance(prompt, str) and spec.as_chat:
        prompt = ({"role": "user", "content": prompt},)
    if not isinstance(prompt, str):
        return with_system(prompt, spec.system)
    if spec.system is not None:
        hint = "`as_chat: true` makes it a user message; or write the prompt as a list of messages"
        raise _Unusable("the set has a `system` prompt, but this prompt is plain text without turns", hint)
    return prompt


def _filled(template: Template, prompt: str, columns: Mapping[str, Any]) -> str:
    """The template's text for a row."""
    text = ""
    for literal, slot in template.parts:
        text += literal
        if slot is not None:
            try:
                value = _required(columns, slot or prompt, "prompt")
            except _Unusable as problem:
                raise _Unusable(problem.args[0], "the slots of `template` are columns that every row has") from problem
            if not isinstance(value, (str, int, float)) or isinstance(value, bool):
                raise _Unusable(f"column `{slot or prompt}` holds {kind_of(value)}, and a slot of `template` takes text or a number")
            text += str(value)
    return text


def _reference(spec: DataSpec, pattern: re.Pattern[str] | None, columns: Mapping[str, Any]) -> Any:
    if spec.columns.reference is not None:
        value = _required(columns, spec.columns.reference, "reference")
    elif spec.answers:
        value = _answer(spec, columns)
    else:
        present = [name for name in INFERRED_REFERENCES if name in columns]
        if len(present) == 2:
            raise _Unusable("there is a column `answer` and a column `reference`", "say which: `columns: {reference: answer}`")
        value = columns[present[0]] if present else None
    return value if pattern is None else _extract(pattern, value)


def _answer(spec: DataSpec, columns: Mapping[str, Any]) -> Any:
    """The answer of a row that has to carry one: the assistant's last turn, or the column where answers usually stand."""
    _, answer = split_turns(_required(columns, spec.columns.prompt or "prompt", "prompt"))
    name = answer_column(columns)
    if answer is None and name is None:
        raise _Unusable("there is no answer to learn", "end the messages with the assistant's turn, or name a column: `columns: {reference: ...}`")
    return columns[name] if answer is None else answer


def _extract(pattern: re.Pattern[str], value: Any) -> Any:
    """What the group finds in the text, or in each text of a list."""
    if isinstance(value, list) and value:
        return [_extract(pattern, item) for item in value]
    if not isinstance(value, str):
        raise _Unusable(f"`extract_reference` needs text to look at, and the reference is {'missing' if value is None else type(value).__name__}")
    match = pattern.search(value)
    found = (match[1] or "").strip() if match else ""
    if not found:
        raise _Unusable(f"`extract_reference` {pattern.pattern!r} finds nothing in the reference {_short(value)!r}")
    return found


def _pattern(spec: DataSpec) -> re.Pattern[str] | None:
    if spec.extract_reference is None:
        return None
    try:
        pattern = re.compile(spec.extract_reference)
    except re.error as error:
        raise UsageError(f"data set `{spec.name}`: `extract_reference` is no regular expression: {error}") from error
    if pattern.groups != 1:
        raise UsageError(
            f"data set `{spec.name}`: `extract_reference` must have exactly one group, it has {pattern.groups}",
            hint="brackets around what is the answer, as in '#### (.*)'; others as (?:...)",
        )
    return pattern


def _required(columns: Mapping[str, Any], name: str, what: str) -> Any:
    """The value of a column that has to be there and not null."""
    value = _find(columns, name, what)
    if value is None:
        raise _Unusable(f"column `{name}` is null", f"every row needs a {what}; remove the row or fill it in")
    return value


def _find(columns: Mapping[str, Any], name: str, what: str) -> Any:
    """The value of a column that has to be there. A key that holds the whole dotted name goes before the nested one."""
    value: Any = columns
    parts = [name] if name in columns else name.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(value, Mapping) or part not in value:
            raise _Unusable(*_missing(name, what, value, ".".join(parts[:depth])))
        value = value[part]
    return value


def _missing(name: str, what: str, holder: Any, path: str) -> tuple[str, str]:
    if isinstance(holder, Mapping):
        there = [f"{path}.{key}" if path else key for key in holder]
        close = difflib.get_close_matches(name, there, n=1)
        hint = f"did you mean `{close[0]}`? " if close else ""
        known = f"it has: {', '.join(there)}" if there else "it is empty"
    else:
        hint, known = "", f"`{path}` is {type(holder).__name__}, not an object"
    return f"no column `{name}`; {known}", hint + f"name the right one: `columns: {{{what}: ...}}`"


def _optional_text(columns: Mapping[str, Any], name: str | None, what: str) -> str | None:
    """The text of a named label or id column. A null label is no label; a null id is refused."""
    if name is None:
        return None
    value = _find(columns, name, what) if what == "label" else _required(columns, name, what)
    if value is None:
        return None
    if what == "id" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise _Unusable(f"column `{name}` must hold the {what} as text, it holds {_short(repr(value))}")
    return value


def _note_inferred(spec: DataSpec, columns: Mapping[str, Any], place: str, seen: dict[str, str]) -> None:
    """One set has one place for references: a set where half the rows say `answer` and half `reference` is refused like a row with both."""
    if spec.columns.reference is None and not spec.answers:
        for name in INFERRED_REFERENCES:
            if name in columns:
                seen.setdefault(name, place)
        if len(seen) == 2:
            where = " and ".join(f"`{name}` at {first}" for name, first in seen.items())
            raise _Unusable(f"the set has two columns that could be the reference: {where}", "say which: `columns: {reference: answer}`")


def _check_ids(spec: DataSpec, rows: Sequence[Row]) -> None:
    if spec.columns.id is not None:
        first: dict[str, Row] = {}
        for row in rows:
            other = first.setdefault(row.id, row)
            if other is not row:
                raise UsageError(
                    f"data set `{spec.name}`: {row.place} has the id `{row.id}` of {other.place}",
                    hint="an id names one row; leave `columns.id` out to number the rows",
                )


def _short(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
