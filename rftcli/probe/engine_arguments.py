"""The names of the arguments that an installed engine takes, read from its source: importing vLLM or SGLang takes seconds, torch and a GPU's driver.

A field of a dataclass stands in its class or in a base in the same file; a switch of a command line in a call of `add_argument`. What is declared in
another way cannot be read so, and then nothing is said (None): the engine itself refuses what it does not know. No torch.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VLLM_ARGUMENTS = "engine/arg_utils.py"
VLLM_FRONTENDS = ("entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")
"""Where the arguments of vLLM's server are declared beyond those of its engine: the newer place, and the older one."""
SGLANG_ARGUMENTS = "srt/server_args.py"
SGLANG_FIELDS = "srt/arg_groups/fields"
"""Where releases of SGLang whose `ServerArgs` is put together from several classes declare them; each has an `_NS_PATH`."""
ALWAYS = {"vllm": "model", "sglang": "model_path"}
"""An argument that every release has. Names without it are not the whole list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """`file`: where a person finds them."""

    names: frozenset[str]
    file: Path


def vllm_arguments(*, serve: bool) -> Declared | None:
    """Of `vllm.LLM`, or of `vllm serve` with `_` for `-`. None where vLLM is not installed or declares them in another way."""
    package = _package("vllm")
    tree = None if package is None else _tree(package / VLLM_ARGUMENTS)
    if package is None or tree is None:
        return None
    names = fields(tree, "AsyncEngineArgs" if serve else "EngineArgs")
    if names is None or not serve:
        return _whole("vllm", names, package / VLLM_ARGUMENTS)
    found = next((read for place in VLLM_FRONTENDS if (read := _tree(package / place)) is not None), None)
    frontend = None if found is None else fields(found, "FrontendArgs")
    if found is None or frontend is None:
        return None
    return _whole("vllm", names | frontend | set(switches(tree)) | set(switches(found)), package / VLLM_ARGUMENTS)


def sglang_arguments() -> Declared | None:
    """Of `sglang.Engine`. None where SGLang is not installed or declares them in another way."""
    package = _package("sglang")
    tree = None if package is None else _tree(package / SGLANG_ARGUMENTS)
    if package is None or tree is None:
        return None
    names = fields(tree, "ServerArgs")
    for path in sorted((package / SGLANG_FIELDS).glob("*.py")):
        part = _tree(path)
        for node in () if part is None else part.body:
            if isinstance(node, ast.ClassDef) and "_NS_PATH" in _assigned(node):
                names = (names or set()) | set(_annotated(node))
    return _whole("sglang", names, package / SGLANG_ARGUMENTS)


def fields(tree: ast.Module, name: str) -> set[str] | None:
    """Names of the fields of a class, those of its bases included. None where a base stands in another file.

    >>> fields(ast.parse("class A:\\n    x: int\\nclass B(A):\\n    y: int = 0\\n    z: ClassVar[int] = 1"), "B") == {"x", "y"}
    True
    """
    node = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if node is None:
        return None
    found = set(_annotated(node))
    for base in node.bases:
        above = fields(tree, base.id) if isinstance(base, ast.Name) else None
        if above is None:
            return None
        found |= above
    return found


def switches(tree: ast.Module) -> Iterator[str]:
    """Names of a command line's switches, `_` for `-`.

    >>> list(switches(ast.parse("parser.add_argument('--api-server-count', '-asc', type=int)")))
    ['api_server_count']
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for word in node.args:
                if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value.startswith("--"):
                    yield word.value.removeprefix("--").replace("-", "_")


def _annotated(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and "ClassVar" not in ast.unparse(line.annotation):
            yield line.target.id


def _assigned(node: ast.ClassDef) -> set[str]:
    return {target.id for line in node.body if isinstance(line, ast.Assign) for target in line.targets if isinstance(target, ast.Name)}


def _whole(engine: str, names: set[str] | None, file: Path) -> Declared | None:
    return Declared(names=frozenset(names), file=file) if names is not None and ALWAYS[engine] in names else None


def _package(name: str) -> Path | None:
    """Its folder, found without running its first line."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # it is of a release, or for a Python, that is not known here
        return None
