"""A scorer's name is that of a file of the run: its kept scores lie in one, and must not lie anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rftcli.recipe.load import load_text


@pytest.mark.parametrize("name", ["../s", "a/b", ".hidden", "..", "a\\\\b"])
def test_a_name_that_leads_elsewhere(minimal: str, problems_of: Callable[..., Any], name: str) -> None:
    (problem,) = problems_of(minimal, sets=[f"models.scorers={{'{name}': {{kind: http, urls: ['http://x']}}}}"])
    assert problem.message.startswith("must be a file name without `/`") and problem.label == "it names a directory or a file of the run"


@pytest.mark.parametrize("name", ["s", "help[ful] 2", "größe"])
def test_a_name_that_does_not(minimal: str, name: str) -> None:
    loaded = load_text(minimal, sets=[f"models.scorers={{'{name}': {{kind: http, urls: ['http://x']}}}}"], env={})
    assert list(loaded.recipe.models.scorers) == [name]
