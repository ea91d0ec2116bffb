"""How problems are shown: the example of the contract to the letter, and what the renderer does with awkward text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rftcli.errors import RecipeError
from rftcli.recipe.load import load_recipe, load_text
from rftcli.recipe.problems import Place, Problem, Source, in_order, raise_problems, render

RECIPE = """\
# two mistakes
models:
  policy:
    path: org/model
data:
  train: {path: train.jsonl, label: math}
train: {steps: 10}
rewards:
  math:
    combine: sum
    parts:
    -
      rule: math_answer
      wieght: 2


rollout:
  temperature: 1.0
  max_new_tokens: 64
  max_prompt_tokens: 64
  samples_per_prompt: 1
"""

SHOWN = """\
error: 2 problems in recipes/gsm8k.yaml

recipes/gsm8k.yaml:14:7  rewards.math.parts[0]  unknown key `wieght`
   |
14 |       wieght: 2
   |       ^^^^^^ did you mean `weight`?
   | allowed here: rule, model, python, name, weight, options, on_error, text, clip, timeout_seconds

recipes/gsm8k.yaml:21:23  rollout.samples_per_prompt  must be at least 2 for `grpo`, got 1
   |
21 |   samples_per_prompt: 1
   |                       ^ a group of one has nothing to be compared with
hint: `rft explain rollout.samples_per_prompt`"""


def test_the_example(write: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("recipes/gsm8k.yaml", RECIPE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipes/gsm8k.yaml")
    assert str(caught.value) == SHOWN
    assert caught.value.exit_code == 2


def test_json_form(problems_of: Callable[..., list[Problem]]) -> None:
    first, second = (json.loads(json.dumps(item.to_json())) for item in problems_of(RECIPE))
    assert first == {
        "code": "unknown-key",
        "path": "rewards.math.parts[0]",
        "message": "unknown key `wieght`",
        "file": "recipe",
        "line": 14,
        "column": 7,
        "length": 6,
        "text": "      wieght: 2",
        "label": "did you mean `weight`?",
        "allowed": ["rule", "model", "python", "name", "weight", "options", "on_error", "text", "clip", "timeout_seconds"],
    }
    assert second["code"] == "group-of-one" and second["hint"] == "`rft explain rollout.samples_per_prompt`"
    assert "allowed" not in second


def at(text: str, line: int, column: int, length: int) -> Problem:
    return Problem(
        code="x", path="a.b", message="m", place=Place(source=Source("f", text, "/"), line=line, column=column, length=length), label="here"
    )


def test_one_problem_is_singular() -> None:
    assert render("f", [at("seed: x", 1, 7, 1)]) == "error: 1 problem in f\n\nf:1:7  a.b  m\n  |\n1 | seed: x\n  |       ^ here"


def test_tabs_are_repeated_so_that_the_caret_stays_below() -> None:
    assert render("f", [at("a:\tbad", 1, 4, 3)]).splitlines()[-1] == "  |   \t^^^ here"


def test_wide_and_combining_characters_count_as_they_are_shown() -> None:
    assert render("f", [at("数据: 值", 1, 5, 1)]).splitlines()[-1] == "  |       ^^ here"
    assert render("f", [at("e\u0301: x", 1, 5, 1)]).splitlines()[-1] == "  |    ^ here"


def test_a_long_line_is_cut_around_the_caret() -> None:
    line = "a: " + "x" * 5000 + "BAD" + "y" * 5000
    shown = render("f", [at(line, 1, 5004, 3)]).splitlines()
    source, marks = shown[-2], shown[-1]
    assert len(source) < 200
    assert source[marks.index("^") : marks.index("^") + 3] == "BAD"


def test_control_characters_cannot_reach_the_terminal() -> None:
    problem = Problem(code="x", path="a", message="unknown key `\x1b[2J`", place=None, label="\x1b]0;x\x07")
    assert "\x1b" not in render("f", [problem]) and "\x07" not in render("f", [problem])


def test_the_caret_of_nothing_is_one_wide() -> None:
    assert render("f", [at("a:", 1, 3, 0)]).splitlines()[-1] == "  |   ^ here"


def test_without_a_place_the_file_is_named() -> None:
    assert render("r.yaml", [Problem(code="x", path="", message="cannot be read", label="No such file")]).splitlines()[2:] == [
        "r.yaml  cannot be read",
        "  | No such file",
    ]


def test_order_and_repetitions() -> None:
    first, second = at("a\nb\nc", 1, 1, 1), at("a\nb\nc", 3, 1, 1)
    assert in_order([second, first, at("a\nb\nc", 3, 1, 1)]) == [first, second]


def test_no_problems_raise_nothing() -> None:
    assert raise_problems("f", []) is None


def test_later_problems_are_shown_at_their_key(minimal: str) -> None:
    loaded = load_text(minimal, env={})
    value = loaded.problem("train.steps", "too many", reason="the data has 3 rows", hint="fewer")
    assert (value.path, value.place and (value.place.line, value.place.column, value.place.length)) == ("train.steps", (4, 16, 2))
    key = loaded.problem("train.steps", "m", at_key=True)
    assert key.place and (key.place.column, key.place.length) == (9, 5)
    section = loaded.problem("rewards", "m")
    assert section.place and (section.place.line, section.place.column, section.place.length) == (3, 1, 7)
    entry = loaded.problem("rewards.default.parts[0].weight", "m")
    assert entry.place and (entry.place.line, entry.place.column) == (3, 21), "a key that is not written: the nearest section"
    unwritten = loaded.problem("batch.prompts_per_step", "m")
    assert unwritten.place and (unwritten.place.line, unwritten.place.column) == (1, 1)
    single = loaded.problem("data.train.path", "m")
    assert single.place and single.place.column == 22, "a single set may be named without its index"
    with pytest.raises(RecipeError, match=r"(?s)error: 2 problems in recipe.*recipe:3:1  rewards  m.*recipe:4:16  train.steps  too many"):
        loaded.raise_problems([value, section])
    assert loaded.raise_problems([]) is None


def test_a_problem_in_a_parent_is_shown_in_the_parent(write: Callable[[str, str], Path], minimal: str) -> None:
    write("base.yaml", minimal + "rollout:\n  temperture: 1\n")
    child = write("child.yaml", "extends: base.yaml\nseed: x\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(child)
    places = [str(item.place) for item in caught.value.problems]  # type: ignore[attr-defined]
    assert places == [f"{child.parent}/base.yaml:6:3", f"{child}:2:7"]
    assert str(caught.value).startswith(f"error: 2 problems in {child}\n")


def test_a_missing_file_and_a_folder_are_one_problem(tmp_path: Path, write: Callable[[str, str], Path], minimal: str) -> None:
    write("gsm8k.yaml", minimal)
    with pytest.raises(RecipeError, match=r"gsm8.yaml  cannot be read\n  \| No such file or directory\nhint: did you mean `gsm8k.yaml`\?"):
        load_recipe(tmp_path / "gsm8.yaml")
    with pytest.raises(RecipeError, match="Is a directory"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match="not a file name"):
        load_recipe("a\0b")
