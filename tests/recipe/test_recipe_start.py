"""Starting up: nothing heavy is imported, and reading a recipe is quick."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rftcli.recipe
from rftcli.errors import RecipeError
from rftcli.recipe.load import load_recipe, load_text
from rftcli.recipe.schema import resolved_yaml

COST = """
import time
start = time.process_time()
from pydantic import BaseModel
import yaml
middle = time.process_time()
import rftcli.recipe.load
print(middle - start, time.process_time() - middle)
"""


def test_import_is_light() -> None:
    heavy = ("torch", "transformers", "deepspeed", "vllm", "numpy", "rich", "typer", "difflib")
    code = f"import sys, rftcli.recipe.load, rftcli.recipe.explain; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_import_costs_no_more_than_pydantic_itself(tmp_path: Path) -> None:
    """In processor time, with compiled modules; both parts slow down alike on a busy machine."""
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    runs = [subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True, env=env).stdout.split() for _ in range(4)]
    theirs = min(float(first) for first, _ in runs)
    ours = min(float(second) for _, second in runs)
    assert ours < 1.2 * theirs, (ours, theirs)


def test_a_long_recipe_is_read_quickly(full: str) -> None:
    text = resolved_yaml(load_text(full, env={}))
    assert text.count("\n") > 130
    spent = []
    for _ in range(3):
        start = time.process_time()
        load_text(text, env={})
        spent.append(time.process_time() - start)
    assert min(spent) < 0.05, spent


def test_a_thousand_lines_with_many_mistakes_stay_quick(full: str) -> None:
    extra = "".join(f"temperatur{number}: 1\n" for number in range(900))
    start = time.process_time()
    with pytest.raises(RecipeError) as caught:
        load_text(full + extra, env={})
    assert len(caught.value.problems) == 900
    assert time.process_time() - start < 20  # that no mistake reads the file again, whatever the machine


def test_examples_in_docstrings() -> None:
    tried = 0
    for module in pkgutil.iter_modules(rftcli.recipe.__path__, "rftcli.recipe."):
        result = doctest.testmod(importlib.import_module(module.name))
        assert result.failed == 0, module.name
        tried += result.attempted
    assert tried > 12


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    """A pipe nobody writes to, and a device: as a recipe, and as the parent of one."""
    path = Path("/dev/null")
    if kind == "pipe":
        path = tmp_path / "pipe.yaml"
        os.mkfifo(path)
    with pytest.raises(RecipeError, match="is no regular file"):
        load_recipe(path)
    (tmp_path / "child.yaml").write_text(f"extends: {path}\n")
    with pytest.raises(RecipeError):
        load_recipe(tmp_path / "child.yaml")
