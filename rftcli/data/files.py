"""Files and python functions as streams of records, before anything is known about columns.

What is left out: the meaning of a record (`rows`), folders and data sets of a hub (`hub`), and which of them a path means (`origin`).
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rftcli.builtin import builtin_path
from rftcli.data.faults import Faults, Record, json_problem, kind_of, record_problem
from rftcli.data.tables import csv_records, parquet_records
from rftcli.errors import RftError, UsageError

PACKED = ".gz"
"""Behind the suffix of a text format: the file is unpacked while it is read."""


def locate(path: str, search_path: Sequence[Path]) -> Path:
    """The existing file that `path` means, `~` expanded; a relative one in the first directory of `search_path` that has it.

    An empty `search_path` means the working directory. `builtin:` names are those of data that ship with the package. UsageError for a
    missing file or a directory.
    """
    if path.startswith("builtin:"):
        return builtin_path(path.removeprefix("builtin:"))

    wanted = Path(path).expanduser()
    places = [directory / wanted for directory in (search_path or (Path(),))]  # an absolute `wanted` stays as it is
    for place in places:
        if place.is_file():
            return place
        if place.is_dir():
            raise UsageError(f"`{place}` is a directory, not a file", hint="name the file itself")
        if place.exists():
            raise UsageError(f"`{place}` is no regular file", hint="write the rows into a file first: they are read more than once")
    tried = ", ".join(f"`{place}`" for place in dict.fromkeys(places))
    raise UsageError(f"no such file: {tried}", hint="a path is relative to the recipe that names it; a data set of the hub is `org/name`")


def format_of(path: Path) -> str:
    """The suffix that says how a file is read: `.jsonl` of `a.jsonl` and of `a.jsonl.gz`."""
    name = path.name.lower()
    return Path(name.removesuffix(PACKED)).suffix


def file_records(path: Path, faults: Faults) -> Iterator[Record]:
    """The records of a file, by its suffix (`FORMATS`)."""
    suffix = format_of(path)
    known = [*FORMATS, *(f"{name}{PACKED}" for name in FORMATS if name != ".parquet")]
    packed = path.name.lower().endswith(PACKED)
    if suffix not in FORMATS or (packed and suffix == ".parquet"):
        raise UsageError(
            f"data set `{faults.source}`: cannot read `{path}`: unknown suffix `{suffix + PACKED if packed else suffix}`",
            hint=f"known: {', '.join(known)}; a `python` source reads anything",
        )
    return _unpacking(FORMATS[suffix](path, faults), path, faults.source)


def _unpacking(records: Iterator[Record], path: Path, source: str) -> Iterator[Record]:
    try:
        yield from records
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"data set `{source}`: {path} cannot be unpacked: {error}", hint="is the file whole? `gzip -t` checks it") from error
    except OSError as error:
        raise UsageError(f"data set `{source}`: {path} cannot be read: {error.strerror or error}") from error


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.name.lower().endswith(PACKED) else path.open("rb")  # type: ignore[return-value]


def python_records(target: str, options: Mapping[str, Any], search_path: Sequence[Path], faults: Faults) -> Iterator[Record]:
    """What `package.module:function` yields for `options`. `search_path` is looked through before the installed packages.

    UsageError if it cannot be imported or raises; errors of ours (a missing package) pass through as they are.
    """
    with _importing_from(search_path):
        try:
            function = _function(target)
            for number, record in enumerate(function(**options), start=1):
                place = f"{target} row {number}"
                problem = record_problem(record) or json_problem(record)
                if problem is None:
                    yield place, record
                else:
                    faults.add(place, problem, "yield mappings of text, numbers, lists and mappings")
        except RftError:
            raise
        except (Exception, SystemExit) as error:  # code of the user: whatever it raises is its author's to read
            raise UsageError(f"data set `{faults.source}`: `{target}` failed with {type(error).__name__}: {error}") from error


def called(target: str, options: Mapping[str, Any], search_path: Sequence[Path]) -> Any:
    """What `package.module:name` gives when it is called with `options`. UsageError if it cannot be imported or raises."""
    with _importing_from(search_path):
        try:
            return _function(target)(**options)
        except RftError:
            raise
        except (Exception, SystemExit) as error:  # code of the user: whatever it raises is its author's to read
            raise UsageError(f"`{target}` failed with {type(error).__name__}: {error}") from error


@contextmanager
def _importing_from(search_path: Sequence[Path]) -> Iterator[None]:
    added = [str(directory.resolve()) for directory in search_path]
    sys.path[:0] = added
    try:
        yield
    finally:
        for entry in added:
            sys.path.remove(entry)


def _function(target: str) -> Callable[..., Iterable[Any]]:
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise UsageError(f"`{target}` does not name a function", hint="write `package.module:function`")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"cannot import `{module_name}` for `{target}`: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"module `{module_name}` has no function `{name}`")
    return function


def _jsonl(path: Path, faults: Faults) -> Iterator[Record]:
    """One object a line. Only a line feed ends a line (U+2028 is text); carriage returns, blank lines and a byte-order mark are passed over."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = _without_bom(line, path)
            line = line.strip(b" \t\r\n")
            if line:
                place = f"{path}:{number}"
                try:
                    record = _parse(line)
                except (ValueError, RecursionError) as error:
                    array = number == 1 and line.startswith(b"[")
                    hint = "this looks like one JSON array: rename the file to .json" if array else "one JSON object a line, in UTF-8"
                    faults.add(place, _explain(error), hint)
                    continue
                problem = record_problem(record)
                if problem is None:
                    yield place, record
                else:
                    faults.add(place, problem, "one JSON object a line")


def _json(path: Path, faults: Faults) -> Iterator[Record]:
    """One array of objects. The whole file is in memory while it is read."""
    try:
        records = _parse(_without_bom(_whole(path), path))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"data set `{faults.source}`: {path}{line}: {_explain(error)}", hint="JSON Lines are read from .jsonl") from error
    if not isinstance(records, list):
        raise UsageError(f"data set `{faults.source}`: {path} holds {kind_of(records)}, not an array of objects")
    for number, record in enumerate(records, start=1):
        problem = record_problem(record)
        if problem is None:
            yield f"{path} row {number}", record
        else:
            faults.add(f"{path} row {number}", problem, "an array of JSON objects")


def _csv(path: Path, faults: Faults) -> Iterator[Record]:
    with _open(path) as file:
        yield from csv_records(file, path, faults, delimiter=",")


def _tsv(path: Path, faults: Faults) -> Iterator[Record]:
    with _open(path) as file:
        yield from csv_records(file, path, faults, delimiter="\t")


def _whole(path: Path) -> bytes:
    with _open(path) as file:
        return file.read()


def _without_bom(data: bytes, path: Path) -> bytes:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"`{path}` is UTF-16", hint="save it as UTF-8")
    return data.removeprefix(b"\xef\xbb\xbf")


def _parse(data: bytes) -> Any:
    """Strict JSON in UTF-8. ValueError for bad bytes, a key given twice, NaN, or half a surrogate pair; all of these are lost or fail later."""
    value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    if re.search(rb"\\u[dD][89a-fA-F]", data):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key `{twice}` is given twice")
    return record


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null")


def _explain(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02X} at position {error.start + 1}"
    if isinstance(error, UnicodeEncodeError):
        return "text with half a surrogate pair (\\ud800..\\udfff), which is no character"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return f"not usable: {error}"


# Suffix -> reader(path, faults) of records. To add one: write a generator that yields (place, columns), puts what it cannot read into `faults`,
# and imports what it needs inside; then name its suffix here.
FORMATS: dict[str, Callable[[Path, Faults], Iterator[Record]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": parquet_records,
    ".csv": _csv,
    ".tsv": _tsv,
}
