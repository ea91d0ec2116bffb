"""What `path` of a data set means on this machine: a file, a folder, or a data set of the hub. Then its records, whichever it is.

A path that exists is what it is. One that does not and looks like `org/name` is the hub's; everything else is a missing file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rftcli.data.faults import Faults, Record
from rftcli.data.files import FORMATS, PACKED, file_records, locate, python_records
from rftcli.data.hub import library_records, option_problem
from rftcli.data.spec import DataSpec
from rftcli.errors import UsageError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""`org/name`. The recipe room has the same pattern, to leave such a path as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """`kind`: python, file, folder or hub. `path`: of a file or folder, absolute or relative to the working directory."""

    kind: str
    shown: str
    path: Path | None = None

    @property
    def files(self) -> list[Path]:
        """The files whose change changes the rows; none where they cannot be known."""
        if self.path is None:
            return []
        return [self.path] if self.path.is_file() else sorted(path for path in self.path.rglob("*") if path.is_file())


def looks_like_hub_id(path: str) -> bool:
    """
    >>> looks_like_hub_id("openai/gsm8k"), looks_like_hub_id("data/train.jsonl"), looks_like_hub_id("./openai/gsm8k")
    (True, False, False)
    """
    return HUB_ID.fullmatch(path) is not None and not path.lower().endswith((*FORMATS, PACKED))


def origin_of(spec: DataSpec, search_path: Sequence[Path]) -> Origin:
    """UsageError for a path that is nothing, and for `split` and `options` where they mean nothing."""
    if spec.path is None:
        return Origin(kind="python", shown=str(spec.python))
    found = _find(spec.path, search_path)
    if found.kind == "file":
        for name, given in (("split", spec.split), ("options", spec.options)):
            if given:
                raise UsageError(
                    f"data set `{spec.name}`: `{name}` means nothing for the file {found.shown}",
                    hint="name the file of the split in `path`" if name == "split" else "a file is read as its suffix says",
                )
    elif (problem := option_problem(spec.options)) is not None:
        raise UsageError(f"data set `{spec.name}`: `options`: {problem}")
    return found


def _find(path: str, search_path: Sequence[Path]) -> Origin:
    if not path.startswith("builtin:"):
        wanted = Path(path).expanduser()
        for place in [directory / wanted for directory in (search_path or (Path(),))]:
            if place.is_dir():
                return Origin(kind="folder", shown=str(place), path=place)
            if place.exists():
                break
        else:
            if looks_like_hub_id(path):
                return Origin(kind="hub", shown=path)
    file = locate(path, search_path)
    return Origin(kind="file", shown=str(file), path=file)


def open_records(spec: DataSpec, search_path: Sequence[Path], faults: Faults) -> Iterator[Record]:
    """Every record of a set from the first on; what cannot be read goes into `faults`."""
    found = origin_of(spec, search_path)
    if found.kind == "python":
        yield from python_records(found.shown, spec.options, search_path, faults)
    elif found.kind == "file":
        assert found.path is not None
        yield from file_records(found.path, faults)
    else:
        yield from library_records(found.shown, spec.split, spec.options, faults, streaming=spec.streaming)
