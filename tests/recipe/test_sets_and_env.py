"""`--set` on the command line, dotted paths, and `${VAR}`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.errors import RecipeError
from rftcli.recipe.expand import ExpansionError, expand
from rftcli.recipe.load import load_recipe, load_text
from rftcli.recipe.paths import format_path, parse_path, parse_pieces, related
from rftcli.recipe.problems import Problem
from rftcli.recipe.schema import resolved_yaml

Problems = Callable[..., list[Problem]]


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.steps=20", "train.steps", 20),
        ("train.steps=1e3", "train.steps", 1000),
        ("rollout.stop=['a', \"\\n\"]", "rollout.stop", ("a", "\n")),
        ("rollout.temperature= 0.5 # warm", "rollout.temperature", 0.5),
        ("name=no", "name", "no"),
        ("track.wandb={project: p}", "track.wandb.project", "p"),
        ("data.train.limit=3", "data.train.0.limit", 3),
        ("data.train[0].limit=3", "data.train.0.limit", 3),
        ("data.train.0.limit=3", "data.train.0.limit", 3),
        ("rewards.default[0].weight=2", "rewards.default.parts.0.weight", 2.0),
        ("rewards.default.0.weight=2", "rewards.default.parts.0.weight", 2.0),
        ("rewards.default.parts[0].weight=2", "rewards.default.parts.0.weight", 2.0),
        ("rewards.default=[{rule: near}]", "rewards.default.parts.0.rule", "near"),
        ('rewards.default.parts[0].options."a.b=c"=1', "rewards.default.parts.0.options", {"a.b=c": 1}),
        ("data.eval.'v1.0'={path: /x}", "data.eval.v1 0.path", "/x"),
        ("models.reference.from=org/ref", "models.reference.from_", "org/ref"),
        ("rollout={top_k: 2}", "rollout.top_k", 2),
        ("rollout.hf.batch_rows=\n  4", "rollout.hf.batch_rows", 4),
    ],
)
def test_values(minimal: str, text: str, path: str, value: Any) -> None:
    found: Any = load_text(minimal, sets=[text], env={}).recipe
    for piece in path.split("."):
        piece = piece.replace("v1 0", "v1.0")
        found = found[int(piece)] if isinstance(found, tuple) else found[piece] if isinstance(found, dict) else getattr(found, piece)
    assert found == value


def test_later_ones_win_and_null_removes(minimal: str) -> None:
    loaded = load_text(minimal + "rollout: {top_k: 5}", sets=["train.steps=1", "train.steps=2", "rollout.top_k=null"], env={})
    assert loaded.recipe.train.steps == 2 and loaded.recipe.rollout.top_k == 0
    assert str(loaded.origin("train.steps")) == "--set 2:1:13"
    assert loaded.raw["rollout"] == {}


def test_lists_are_changed_by_index(full: str) -> None:
    recipe = load_text(full, sets=["data.train[1].weight=3", "eval.pass_k[1]=2", "rewards.math.parts[1].weight=0.2"], env={}).recipe
    assert [source.weight for source in recipe.data.train][:2] == [0.7, 3.0] and recipe.eval.pass_k == (1, 2)
    assert [part.weight for part in recipe.rewards["math"].parts] == [0.9, 0.2, 0.1]


def test_the_same_renderer(minimal: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(minimal, sets=["seed=3", "rollout.temperatur=0.5"], env={})
    shown = str(caught.value).splitlines()
    assert shown[:5] == [
        "error: 1 problem in recipe",
        "",
        "--set 2:1:9  rollout  unknown key `temperatur`",
        "  |",
        "1 | rollout.temperatur=0.5",
    ]
    assert shown[5] == "  |         ^^^^^^^^^^ did you mean `temperature`?"


@pytest.mark.parametrize(
    ("text", "path", "message", "column", "length"),
    [
        ("train.steps=x", "train.steps", "must be an integer or null, got `x`", 13, 1),
        ("train.steps=0", "train.steps", "must be at least 1, got `0`", 13, 1),
        ("data.images={}", "data.images", "`data.images` is not yet supported", 6, 6),
        ("rollout.temperature", "", "no `=`: expected PATH=VALUE", 1, 19),
        ("rollout.temperature=", "", "no value after `=`", 1, 20),
        ("rollout.temperature=# x", "", "no value after `=`", 1, 23),
        ("=3", "", "expected a key", 1, 1),
        ("a..b=3", "", "expected a key, a quoted key or an index", 2, 1),
        ("[0]=3", "", "a path starts with a key", 1, 1),
        ("rollout.stop=[a", "", "not YAML: did not find expected ',' or ']'", 16, 1),
        ("rollout.hf={batch_rows: 1, batch_rows: 2}", "rollout.hf", "duplicate key `batch_rows`", 28, 10),
        ("name='a", "", "not YAML: found unexpected end of stream", 6, 1),
        ("eval.pass_k[3]=1", "eval.pass_k", "has 1 entry, no entry `3`", 12, 3),
        ("eval.pass_k.x=1", "eval.pass_k", "has 1 entry", 13, 1),
        ("extends=[a]", "extends", "`extends` is read from files only", 1, 7),
        ("seed.deep=1", "seed", "must be an integer, got a mapping", 1, 4),
    ],
)
def test_refusals(minimal: str, problems_of: Problems, text: str, path: str, message: str, column: int, length: int) -> None:
    problem = problems_of(minimal + "seed: 3\neval: {pass_k: [1]}", sets=[text])[0]
    assert (problem.path, problem.message) == (path, message)
    assert problem.place is not None
    assert (problem.place.source.name, problem.place.line, problem.place.column, problem.place.length) == ("--set 1", 1, column, length)


def test_a_very_long_path_is_refused(minimal: str, problems_of: Problems) -> None:
    assert problems_of(minimal, sets=[".".join(["a"] * 5000) + "=1"])[0].message == "a path of more than 60 keys"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("a",), "a"),
        (("a", 0, "b"), "a[0].b"),
        (("a", "b.c", "d"), 'a."b.c".d'),
        (("a", 'q"\\'), 'a."q\\"\\\\"'),
        (("", "x"), '"".x'),
        (("Ü-1",), "Ü-1"),
    ],
)
def test_dotted_paths(path: tuple[str | int, ...], text: str) -> None:
    assert format_path(path) == text and parse_path(text) == path


@given(st.tuples(st.text(), st.lists(st.one_of(st.text(), st.integers(0, 10**8)))))
def test_dotted_paths_go_both_ways(parts: tuple[str, list[str | int]]) -> None:
    path = (parts[0], *parts[1])
    assert parse_path(format_path(path)) == path


@pytest.mark.parametrize("text", ["", ".a", "a.", "a b", "a[x]", "a[1", "[1]", "a'b", "a=b"])
def test_what_is_no_path(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_path(text)
    message, offset = caught.value.args
    assert message and 0 <= offset <= len(text)


def test_offsets_of_pieces() -> None:
    assert parse_pieces('a."b c"[2]') == [("a", 0, 1), ("b c", 2, 5), (2, 7, 3)]
    assert related(("a", "b"), ("a",)) and not related(("a", "b"), ("a", "c")) and related((), ("x",))


def test_variables(minimal: str) -> None:
    text = minimal.replace("train.jsonl", '"${DATA}/train.jsonl"').replace("steps: 10", 'steps: "${STEPS}"') + "seed: ${SEED:-5}\nname: run-${WHO}\n"
    loaded = load_text(text, env={"DATA": "/data", "STEPS": "1e2", "WHO": "me"})
    assert loaded.recipe.data.train[0].path == "/data/train.jsonl"
    assert (loaded.recipe.train.steps, loaded.recipe.seed, loaded.recipe.name) == (100, 5, "run-me")
    assert loaded.raw["data"]["train"][0]["path"] == "${DATA}/train.jsonl"
    assert (loaded.raw["train"]["steps"], loaded.raw["seed"], loaded.raw["name"]) == ("${STEPS}", "${SEED:-5}", "run-${WHO}")


def test_the_process_environment_is_the_default(minimal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_TEST_SEED", "12")
    assert load_text(minimal + "seed: ${RFT_TEST_SEED}").recipe.seed == 12


def test_an_unset_variable_is_named(minimal: str, problems_of: Problems) -> None:
    (problem,) = problems_of(minimal.replace("train.jsonl", '"${RFT_DATA}/train.jsonl"'))
    assert (problem.code, problem.path, problem.message) == ("variable", "data.train[0].path", "environment variable `RFT_DATA` is not set")
    assert problem.hint == "`export RFT_DATA=...`, or write `${RFT_DATA:-default}`"
    assert problem.place is not None and (problem.place.line, problem.place.column) == (2, 22)


@pytest.mark.parametrize("text", ["${", "${}", "${1}", "${A-b}", "${a b}", "x${:-y}"])
def test_references_without_a_name_are_refused(minimal: str, problems_of: Problems, text: str) -> None:
    (problem,) = problems_of(minimal + f"name: '{text}'")
    assert problem.code == "variable" and problem.message == "`${` without the name of a variable"


@pytest.mark.parametrize(
    ("text", "value"),
    [("$HOME", "$HOME"), ("a$", "a$"), ("$${A}", "${A}"), ("${A}${B}", "12"), ("${E:-d}", "d"), ("${E}", ""), ("${N:-}", ""), ("${A:-d}", "1")],
)
def test_expansion(text: str, value: str) -> None:
    assert expand(text, {"A": "1", "B": "2", "E": ""}) == value


def test_an_expansion_is_not_expanded_again() -> None:
    assert expand("${A}", {"A": "${B}", "B": "x"}) == "${B}"
    with pytest.raises(ExpansionError):
        expand("${B}", {})


def test_values_of_variables_are_checked_like_written_ones(minimal: str, problems_of: Problems) -> None:
    (problem,) = problems_of(minimal.replace("steps: 10", 'steps: "${N}"'), env={"N": "ten"})
    assert problem.message == "must be an integer or null, got `ten`"
    (problem,) = problems_of(minimal.replace("steps: 10", 'steps: "${N}"'), env={"N": "0"})
    assert problem.message == "must be at least 1, got `0`"
    (problem,) = problems_of(minimal.replace("steps: 10", 'steps: "${N}"'), env={"N": ""})
    assert problem.message == "must be an integer or null, got ``"


def test_variables_in_options_keep_their_quotes(minimal: str) -> None:
    part = "\n  default:\n    - rule: exact\n      options:\n        number: ${N}\n        text: '${N}'"
    text = minimal.replace(" {default: [{rule: exact}]}", part)
    loaded = load_text(text, env={"N": "8"})
    assert loaded.recipe.rewards["default"].parts[0].options == {"number": 8, "text": "8"}
    assert load_text(resolved_yaml(loaded), env={"N": "8"}).recipe == loaded.recipe


def test_no_directory_is_named_like_a_reference(minimal: str, tmp_path: Path) -> None:
    text = minimal.replace("train.jsonl", "~/rows.jsonl") + "track: {tensorboard: ~/runs}"
    recipe = load_text(text, env={"HOME": str(tmp_path)}).recipe
    assert recipe.data.train[0].path == f"{tmp_path}/rows.jsonl" and recipe.track.tensorboard == f"{tmp_path}/runs"
    assert list(tmp_path.iterdir()) == []


def test_a_resolved_recipe_means_the_same_elsewhere(minimal: str, tmp_path: Path) -> None:
    """Relative paths with a reference in them, read again from another folder."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    recipe = tmp_path / "one" / "r.yaml"
    recipe.write_text(minimal.replace("train.jsonl", '"${D}/train.jsonl"'))
    loaded = load_recipe(recipe, env={"D": "rows"})
    assert loaded.recipe.data.train[0].path == f"{tmp_path}/one/rows/train.jsonl"
    copy = tmp_path / "two" / "resolved.yaml"
    copy.write_text(resolved_yaml(loaded))
    assert "${D}" in copy.read_text()
    assert load_recipe(copy, env={"D": "rows"}).recipe == loaded.recipe
    assert load_recipe(copy, env={"D": "others"}).recipe.data.train[0].path == f"{tmp_path}/one/others/train.jsonl"


SECTIONED = """\
models: {policy: {path: m}}
data: {train: {path: d}}
rewards: {default: [{rule: exact}]}
train: {steps: 2}
rollout: {top_p: 0.5, top_k: -1}
"""


@pytest.mark.parametrize("after", [(), ("rollout.min_p=0.1",)])
def test_a_scalar_never_takes_the_place_of_a_section(after: tuple[str, ...]) -> None:
    """Nor is it lost when a later --set goes below it; what is wrong in the section is told beside it."""
    with pytest.raises(RecipeError) as caught:
        load_text(SECTIONED, sets=["rollout=3", *after])
    first, second = sorted(caught.value.problems, key=lambda problem: problem.path)
    assert first.message == "must be a mapping, got `3`, which would take the place of `top_p`, `top_k`"
    assert first.path == "rollout" and "samples_per_prompt" in first.allowed
    assert str(first.hint).startswith("set one of its keys, as in `--set rollout.top_p=...`")
    assert second.path == "rollout.top_k"


def test_a_scalar_in_the_place_of_a_section_that_is_not_written() -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(SECTIONED.replace("-1", "1000"), sets=["train.optimizer=adamw", "train.optimizer.lr=1.0e-6"])
    (problem,) = caught.value.problems
    assert (problem.path, problem.message, problem.label) == ("train.optimizer", "must be a mapping, got `adamw`", "write `{kind: adamw}`")
    assert "--set train.optimizer.kind=..." in str(problem.hint) and "betas" in problem.allowed


@pytest.mark.parametrize("key", ["rewards", "models.scorers", "models.policy.options", "rollout.by_label"])
def test_a_scalar_in_the_place_of_names_of_your_own_is_not_lost(key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(SECTIONED.replace("-1", "1000"), sets=[f"{key}=exact", f"{key}.x={{}}"])
    assert [problem.path for problem in caught.value.problems if problem.message.startswith("must be a mapping, got `exact`")] == [key]


def test_what_a_set_does_to_what_is_written() -> None:
    text = SECTIONED.replace("-1", "1000")
    merged = load_text(text, sets=["rollout={min_p: 0.1}", "rewards={math: [{rule: f1}]}"]).recipe
    assert (merged.rollout.top_p, merged.rollout.min_p, set(merged.rewards)) == (0.5, 0.1, {"default", "math"})
    replaced = load_text(text, sets=["rewards=null", "rewards={math: [{rule: f1}]}", "rewards.math.combine=min", "data.train.label=math"]).recipe
    assert set(replaced.rewards) == {"math"} and replaced.rewards["math"].combine == "min"
    either = load_text(text, sets=["rewards.default.combine=min", "rewards.default.combine.python=a:b"]).recipe
    assert not isinstance(either.rewards["default"].combine, str)  # a key that takes a word or a mapping
