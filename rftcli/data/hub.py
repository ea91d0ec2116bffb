"""Data sets that the library `datasets` reads: folders it saved (`save_to_disk`), folders of data files, and the hub's, by `org/name`.

It leaves out the meaning of a record (`rows`) and single files (`files`). Nothing is imported before a set needs it. What was downloaded lies in
the library's own cache, so ranks find what the plan was made from.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcli.data.faults import Faults, Record, json_problem
from rftcli.data.tables import first_line, plain
from rftcli.errors import MachineError, RftError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

OPTIONS = ("name", "data_dir", "data_files", "revision", "token")
"""Arguments of `datasets.load_dataset` that a recipe may set; `path`, `split` and `streaming` have keys of their own."""
SAVED = ("state.json", "dataset_dict.json")
"""What marks a folder of `save_to_disk`: one set, or several splits."""


def is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def option_problem(options: Mapping[str, Any]) -> str | None:
    """What is wrong with the names of options.

    >>> option_problem({"revison": "main"})
    'there is no option `revison`, did you mean `revision`? known: name, data_dir, data_files, revision, token'
    """
    for name in options:
        if name not in OPTIONS:
            close = difflib.get_close_matches(str(name), OPTIONS, n=1)
            return f"there is no option `{name}`{f', did you mean `{close[0]}`?' if close else ';'} known: {', '.join(OPTIONS)}"
    return None


def library_records(where: str, split: str | None, options: Mapping[str, Any], faults: Faults, *, streaming: bool = False) -> Iterator[Record]:
    """Rows of a folder or of a data set of the hub. UsageError for what is none, and for a split that is missing or has to be named."""
    name, rows = open_set(where, split, options, faults.source, streaming=streaming)
    shown = f"{where}[{name}]" if name else where
    with _telling(where, faults.source):
        for number, row in enumerate(rows, start=1):
            record = {key: plain(value) for key, value in row.items()}
            problem = json_problem(record)
            if problem is None:
                yield f"{shown} row {number}", record
            else:
                faults.add(f"{shown} row {number}", problem, "only text, numbers, lists and mappings can be kept; take the column out of the set")


def open_set(
    where: str, split: str | None, options: Mapping[str, Any], source: str, *, streaming: bool = False
) -> tuple[str | None, Dataset | IterableDataset]:
    """(name of the split, its rows); the name is None for a saved set without splits."""
    try:
        import datasets
    except ImportError as error:
        raise MachineError(f"data set `{source}`: {where} needs the package `datasets`", hint="pip install 'rftcli[data]'") from error
    datasets.disable_progress_bars()
    problem = option_problem(options)
    if problem is not None:
        raise UsageError(f"data set `{source}`: `options`: {problem}")
    folder = Path(where)
    with _telling(where, source):
        if folder.is_dir() and is_saved(folder):
            if options:
                raise UsageError(f"data set `{source}`: {where} was saved whole, it takes no `options`")
            found = datasets.load_from_disk(where)
        else:
            found = datasets.load_dataset(where, streaming=streaming, **options)
    return _split(found, split, where, source)


def _split(
    found: Dataset | DatasetDict | IterableDataset | IterableDatasetDict, split: str | None, where: str, source: str
) -> tuple[str | None, Dataset | IterableDataset]:
    """The split that is meant. A set with one split needs no name; one with several is never guessed."""
    if not isinstance(found, dict):
        if split is not None and str(getattr(found, "split", None)) != split:
            raise UsageError(f"data set `{source}`: {where} has no splits, so `split: {split}` means nothing", hint="leave `split` out")
        return None, found
    names = [str(name) for name in found]
    if split is None and len(names) == 1:
        return names[0], found[names[0]]
    if split is None:
        raise UsageError(f"data set `{source}`: {where} has several splits", hint=f"say which: `split: {names[0]}`; there are {', '.join(names)}")
    if split not in names:
        close = difflib.get_close_matches(split, names, n=1)
        meant = f", did you mean `{close[0]}`?" if close else ""
        raise UsageError(f"data set `{source}`: {where} has no split `{split}`{meant}", hint=f"it has {', '.join(names)}")
    return split, found[split]


class _telling:
    """What the library raises, as an error that a person can act on. A hub out of reach is the machine's fault."""

    def __init__(self, where: str, source: str) -> None:
        self._where, self._source = where, source

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if error is None or isinstance(error, RftError) or not isinstance(error, Exception):
            return
        what = f"data set `{self._source}`"
        chain = list(itertools.islice(_causes(error), 10))
        if any(isinstance(one, ConnectionError) or "offline" in str(one).lower() for one in chain):
            raise MachineError(
                f"{what}: the hub does not answer for `{self._where}` ({first_line(error)}), and there is no such file or folder here",
                hint="a path is relative to the recipe that names it; offline, give the file or folder of a data set that was downloaded before",
            ) from error
        if isinstance(error, FileNotFoundError) and not Path(self._where).exists():
            raise UsageError(
                f"{what}: there is no file or folder `{self._where}` here and no data set of that name on the hub: {first_line(error)}",
                hint="a path is relative to the recipe that names it; a private set needs `huggingface-cli login`",
            ) from error
        raise UsageError(
            f"{what}: `{self._where}` cannot be read: {type(error).__name__}: {first_line(error)}", hint="`options` and `split` name its parts"
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
