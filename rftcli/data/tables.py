"""CSV, TSV and Parquet as streams of records. `files.FORMATS` names them by suffix.

CSV has no types: every value is the text that stands there, and an empty field is null. Parquet keeps its types; dates, times and decimals become
text, because a row has to go through JSON.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rftcli.data.faults import Faults, Record, json_problem
from rftcli.errors import MachineError, UsageError

ROWS_A_BATCH = 1000
"""Rows of a Parquet file that are Python objects at one time."""
_AS_TEXT = (datetime.date, datetime.time, datetime.datetime)


def csv_records(file: BinaryIO, path: Path, faults: Faults, *, delimiter: str) -> Iterator[Record]:
    """Rows of a table with a header line. Quotes as in a spreadsheet; line breaks inside quotes belong to the value; blank lines are passed over."""
    csv.field_size_limit(sys.maxsize // 2)  # a prompt may be longer than the library's 128 KiB
    reader = csv.reader(_lines(file, path, faults), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for fields in reader:
            place, start = f"{path}:{start}", reader.line_num + 1
            if not fields:
                continue
            if header is None:
                header = _header(fields, place, faults.source)
            elif len(fields) != len(header):
                hint = "a value with the delimiter or a line break in it stands in double quotes"
                faults.add(place, f"the row has {len(fields)} fields, the header has {len(header)}", hint)
            else:
                yield place, {name: value or None for name, value in zip(header, fields, strict=True)}
    except csv.Error as error:
        hint = "a double quote inside quotes is written twice"
        raise UsageError(f"data set `{faults.source}`: {path}:{start}: not CSV: {error}", hint=hint) from error
    if header is None:
        raise UsageError(f"data set `{faults.source}`: {path} is empty", hint="the first line names the columns")


def parquet_records(path: Path, faults: Faults) -> Iterator[Record]:
    """Rows of a Parquet file, a batch at a time."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise MachineError(f"data set `{faults.source}`: {path} needs the package `pyarrow`", hint="pip install 'rftcli[data]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_A_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    record = {name: plain(value) for name, value in row.items()}
                    problem = json_problem(record)
                    if problem is None:
                        yield f"{path} row {number}", record
                    else:
                        faults.add(f"{path} row {number}", problem, "leave the column out of the file, or write its values as text or numbers")
    except (arrow.ArrowException, OSError) as error:
        where = f" after row {number}" if number else ""
        raise UsageError(f"data set `{faults.source}`: {path} cannot be read as Parquet{where}: {first_line(error)}") from error


def plain(value: Any) -> Any:
    """A value of a typed table as JSON has it."""
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, _AS_TEXT):
        return value.isoformat()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _lines(file: BinaryIO, path: Path, faults: Faults) -> Iterator[str]:
    """The lines as text, each with its end. Bad bytes are a fault, and the row is read all the same: its quotes decide where the next one begins."""
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            faults.add(f"{path}:{number}", f"not UTF-8: byte 0x{line[error.start]:02X} at position {error.start + 1}", "save the file as UTF-8")
            yield line.decode("utf-8", errors="replace")


def _header(names: list[str], place: str, source: str) -> list[str]:
    names = [name.strip() for name in names]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if "" in names or twice is not None:
        what = f"column {names.index('') + 1} has no name" if "" in names else f"two columns are called `{twice}`"
        raise UsageError(f"data set `{source}`: {place}: {what}", hint=f"the first line names the columns; it says: {', '.join(names)}")
    return names
