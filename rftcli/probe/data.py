"""The facts of the data: rows, labels, references, fingerprints; and what they mean for the reward table. Before any model is loaded.

Whole sets are scanned (or the first rows, for a quick check) with the reader that the run uses, so a row that the run could not use is found
here. Facts of an unchanged file come from a cache. It leaves out lengths in tokens, which need a tokenizer (`data.source`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rftcli.data.once import Tables
from rftcli.data.origin import Origin, origin_of
from rftcli.data.rows import Row, Table
from rftcli.data.spec import DEFAULT_LABEL, DataSpec
from rftcli.probe import cache
from rftcli.probe.cache import user_cache_dir

CACHE_FORMAT = 2
"""To be raised when a reader or a record here changes its meaning; older entries are then never looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFacts:
    """One label of one set.

    >>> LabelFacts(rows=3, example="train.jsonl:1", without_reference=1, example_without="train.jsonl:2").rows
    3
    """

    rows: int
    example: str
    """Place of the first row with the label."""
    without_reference: int
    example_without: str | None
    """Place of the first row that has no reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFacts:
    """One data set. `complete` False: only the first rows were read, and everything here is about them."""

    name: str
    origin: str
    """The file that was read, or the python function."""
    complete: bool
    rows: int
    bytes: int | None
    """Size of the file or files; None for a python source and for the hub."""
    filtered: int
    """Rows that `where` did not let pass; they are not among `rows`."""
    fingerprint: str
    columns: tuple[str, ...]
    """Column names of the first row."""
    labels: Mapping[str, LabelFacts]
    """By label, in order of first appearance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """All sets, in the order in which they were given. Goes through JSON both ways (`codec`)."""

    sets: tuple[SetFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelProblem:
    """Something between the labels of the data and the reward table. `error` False: a warning."""

    error: bool
    label: str
    message: str
    hint: str | None = None


def scan(
    specs: Sequence[DataSpec],
    search_path: Sequence[Path] = (),
    *,
    first: int | None = None,
    cache_dir: Path | None = None,
    tables: Tables | None = None,
) -> DataFacts:
    """Read every set, or the `first` rows of each, and say what is in it.

    `cache_dir` None: the user's cache directory. Sets of python functions and of the hub are always read, unless `tables` has them already.
    UsageError as `data.rows.read_rows`.
    """
    tables = Tables() if tables is None else tables
    folder = user_cache_dir() if cache_dir is None else cache_dir
    return DataFacts(sets=tuple(_scan_set(spec, search_path, first, folder, tables) for spec in specs))


def label_problems(facts: DataFacts, reward_labels: Collection[str], needs_reference: Collection[str] = ()) -> list[LabelProblem]:
    """Rows that no reward entry scores, or that lack what their entry needs; then entries that no row uses. Errors come first.

    `reward_labels`: the keys of the reward table; `default` there serves every row without an entry of its own. `needs_reference`: the keys whose
    parts cannot score without a reference answer. Entries without rows are told only if all sets were read to the end.
    """
    errors: list[LabelProblem] = []
    warnings: list[LabelProblem] = []
    used: set[str] = set()
    for one in facts.sets:
        for label, rows in one.labels.items():
            entry = label if label in reward_labels else DEFAULT_LABEL
            if entry not in reward_labels:
                errors.append(_no_entry(one, label, rows, reward_labels))
                continue
            used.add(entry)
            if entry != label:
                warnings.append(_served_by_default(one, label, rows, reward_labels))
            if entry in needs_reference and rows.without_reference:
                errors.append(_no_reference(one, label, rows, entry))
    if all(one.complete for one in facts.sets):
        labels = [label for one in facts.sets for label in one.labels]
        warnings += [_unused(entry, labels) for entry in reward_labels if entry not in used]
    return errors + warnings


def _scan_set(spec: DataSpec, search_path: Sequence[Path], first: int | None, cache_dir: Path, tables: Tables) -> SetFacts:
    origin = origin_of(spec, search_path)
    before = cache.file_states(origin.files)
    if not before:  # a function, or a set of the hub: nothing says here whether it has changed
        return _facts(spec, tables.read(spec, search_path, first), origin, None)
    entry = cache.entry(cache_dir, "set", CACHE_FORMAT, str(origin.path), before, first, spec)
    known = cache.load(entry, SetFacts)
    if known is not None:
        return known
    facts = _facts(spec, tables.read(spec, search_path, first), origin, sum(state.size for state in before))
    if before == cache.file_states(origin.files) and cache.settled(before):
        cache.store(entry, facts)
    return facts


def _facts(spec: DataSpec, table: Table, origin: Origin, size: int | None) -> SetFacts:
    by_label: dict[str, list[Row]] = {}
    for row in table.rows:
        by_label.setdefault(row.label, []).append(row)
    return SetFacts(
        name=spec.name,
        origin=str(origin.path.resolve()) if origin.kind == "file" and origin.path is not None else origin.shown,
        complete=table.complete,
        rows=len(table.rows),
        bytes=size,
        filtered=table.filtered,
        fingerprint=table.fingerprint,
        columns=tuple(table.rows[0].columns),
        labels={label: _label_facts(members) for label, members in by_label.items()},
    )


def _label_facts(rows: Sequence[Row]) -> LabelFacts:
    without = [row.place for row in rows if row.reference is None]
    return LabelFacts(rows=len(rows), example=rows[0].place, without_reference=len(without), example_without=without[0] if without else None)


def _no_entry(one: SetFacts, label: str, rows: LabelFacts, reward_labels: Collection[str]) -> LabelProblem:
    what = "no label" if label == DEFAULT_LABEL else f"the label `{label}`"
    message = f"data set `{one.name}`: {_count(rows.rows)} with {what} (first: {rows.example}), and `rewards` has no entry for it and no `default`"
    known = ", ".join(f"`{entry}`" for entry in reward_labels) or "none"
    if label == DEFAULT_LABEL:
        hint = f"give the set a `label`, or name the column with `columns.label`; entries of `rewards`: {known}"
    else:
        hint = f"{_did_you_mean(label, reward_labels)}entries of `rewards`: {known}"
    return LabelProblem(error=True, label=label, message=message, hint=hint)


def _served_by_default(one: SetFacts, label: str, rows: LabelFacts, reward_labels: Collection[str]) -> LabelProblem:
    message = f"data set `{one.name}`: {_count(rows.rows)} with the label `{label}` (first: {rows.example}) scored by `rewards.default`"
    return LabelProblem(error=False, label=label, message=message, hint=_did_you_mean(label, reward_labels) or None)


def _no_reference(one: SetFacts, label: str, rows: LabelFacts, entry: str) -> LabelProblem:
    message = (
        f"data set `{one.name}`: {rows.without_reference} of {_count(rows.rows)} with the label `{label}` without a reference "
        f"(first: {rows.example_without}), and `rewards.{entry}` needs one"
    )
    hint = f"name its column with `columns.reference`; there is: {', '.join(one.columns)}"
    return LabelProblem(error=True, label=label, message=message, hint=hint)


def _unused(entry: str, labels: Sequence[str]) -> LabelProblem:
    message = f"`rewards.{entry}` is never used: no row has this label"
    return LabelProblem(error=False, label=entry, message=message, hint=_did_you_mean(entry, labels) or None)


def _count(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _did_you_mean(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, [name for name in known if name != DEFAULT_LABEL], n=1)
    return f"did you mean `{close[0]}`? " if close else ""
