"""Whatever is in a file, on the command line or in the environment: a recipe or a RecipeError, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rftcli.errors import RecipeError
from rftcli.recipe.kinds import keys
from rftcli.recipe.load import load_recipe, load_text
from rftcli.recipe.problems import Problem
from rftcli.recipe.schema import resolved_yaml

ENV = {"HOME": "/home/me", "A": "1", "B": "text", "C": "${A}"}
FAST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

PIECES = """1 0 -1 1e-6 012 no null ~ 1:30 .inf auto grpo hf k1 m:f << extends *a !!str ${A} "${B}" ${ ' " [ ] { } --- #"""
WORDS = st.sampled_from(sorted({key.name for key in keys()}) + PIECES.split() + ["&a x", "!x y", "| \n  x", ": ", "- ", "\t", "\n", "\n  "])


def check(text: str, sets: tuple[str, ...] = ()) -> None:
    try:
        loaded = load_text(text, sets=sets, env=ENV, known_rules={"exact": ("a",)})
    except RecipeError as error:
        assert error.exit_code == 2 and error.message.startswith("error: ") and error.problems
        for problem in error.problems:
            assert isinstance(problem, Problem)
            json.dumps(problem.to_json())
            if problem.place is not None:
                assert 1 <= problem.place.line <= len(problem.place.source.lines)
                assert 1 <= problem.place.column <= len(problem.place.text) + 1
    else:
        again = load_text(resolved_yaml(loaded, origins=True), env=ENV).recipe
        assert again.model_copy(update={"extends": ()}) == loaded.recipe.model_copy(update={"extends": ()})


@FAST
@given(st.lists(WORDS, max_size=25).map(" ".join))
def test_words_of_recipes(text: str) -> None:
    check(text)


@FAST
@given(st.text(max_size=80))
def test_any_text(text: str) -> None:
    check(text)


@FAST
@given(st.binary(max_size=60))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(data)
    with pytest.raises(RecipeError):
        load_recipe(path, env=ENV)


@FAST
@given(st.data())
def test_a_recipe_with_a_piece_replaced(full: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(full)))
    end = data.draw(st.integers(start, min(len(full), start + 30)))
    piece = data.draw(st.one_of(WORDS, st.text(max_size=5)))
    check(full[:start] + piece + full[end:])


@FAST
@given(st.lists(st.tuples(st.sampled_from([key.pattern for key in keys()]), st.one_of(WORDS, st.text(max_size=8))), max_size=3))
def test_any_value_for_any_key(full: str, pairs: list[tuple[str, str]]) -> None:
    sets = tuple(f"{pattern.replace('[]', '[0]').replace('NAME', 'held_out').replace('LABEL', 'math')}={value}" for pattern, value in pairs)
    check(full, sets)


@FAST
@given(st.lists(st.text(max_size=20), max_size=2))
def test_any_set(minimal: str, sets: list[str]) -> None:
    check(minimal, tuple(sets))
