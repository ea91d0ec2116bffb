"""`${VAR}`, `${VAR:-default}` and `~` in values, and relative paths made absolute.

`$${` is a literal `${`. Names that are not set are an error, and so is a `${` that names no variable: no file called `${DATA}` is ever made.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftcli.recipe.sections import PathText

_REFERENCE = re.compile(r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\})?")


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".gz")
"""Suffixes that make `folder/name` a file, here or missing, and never a data set of the hub."""


def looks_like_hub_id(path: str) -> bool:
    """Whether a data path is `org/name`, as `data.origin` reads it.

    >>> looks_like_hub_id("openai/gsm8k"), looks_like_hub_id("data/train.jsonl")
    (True, False)
    """
    return _HUB_ID.fullmatch(path) is not None and not path.lower().endswith(DATA_FILES)


class ExpansionError(Exception):
    """A reference cannot be replaced. `hint` is for the person."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Unexpanded:
    """A value as it goes to disk: with its references. `plain`: written without quotes."""

    text: str
    plain: bool


def expand(text: str, env: Mapping[str, str]) -> str:
    """
    >>> expand("${DATA}/train.jsonl", {"DATA": "/data"}), expand("${N:-8}", {}), expand("$${N}", {})
    ('/data/train.jsonl', '8', '${N}')
    """

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        name, default = match["name"], match["default"]
        if name is None:
            raise ExpansionError(
                "`${` without the name of a variable", "write `${NAME}` or `${NAME:-default}`, or `$${` for the characters themselves"
            )
        value = env.get(name)
        if value is not None and (value or default is None):
            return value
        if default is None:
            raise ExpansionError(f"environment variable `{name}` is not set", f"`export {name}=...`, or write `${{{name}:-default}}`")
        return default

    return _REFERENCE.sub(replace, text) if "${" in text else text


def resolve(text: str, marker: PathText, base: str, env: Mapping[str, str]) -> str:
    """The path that `text` means, absolute unless it is no file: a hub id, `builtin:`, a URL, Jinja text, an output directory.

    `base`: absolute directory of the file that wrote it.
    """
    if text == marker.word or text.startswith("builtin:") or "://" in text or (marker.kind == "template" and "{" in text):
        return text
    if text == "~" or text.startswith("~/"):
        home = env.get("HOME")
        return str((Path(home) if home else Path.home()) / text[2:])
    if marker.kind == "output":
        return text
    inside = os.path.normpath(Path(base) / text)
    explicit = text.startswith(("./", "../", "/")) or text in (".", "..")
    if marker.kind == "model" and not explicit and not _exists(Path(inside)):
        return text
    if marker.kind == "data" and looks_like_hub_id(text) and not _exists(Path(inside)):
        return text
    return inside


def keep_references(written: str, expanded: str, resolved: str, base: str) -> str:
    """What to write to disk for a path with references, so that it means the same when it is read from another directory."""
    if resolved == expanded or expanded.startswith(("/", "~")) or written.startswith("~"):
        return written
    return str(Path(base.replace("${", "$${")) / written)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False  # too long, or not a name at all
