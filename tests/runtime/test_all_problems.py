"""Everything that is wrong with a recipe is told at once, also what its rules do not see."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - with it here, prompts are measured in this process, not in one of their own

from rftcli.errors import RecipeError
from rftcli.recipe.load import UNSOUND
from rftcli.recipe.rules import RULES
from rftcli.runtime.prepare import validate

MINIMAL = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 10}
"""
TWICE = "rewards.default=[{python: 'here:f'}, {python: 'there:f'}]"
"""Two parts of one name, whose modules are nowhere."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("r.yaml").write_text(MINIMAL)
    Path("train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')


def told(*sets: str) -> list[tuple[str, str, str]]:
    with pytest.raises(RecipeError) as caught:
        validate(Path("r.yaml"), sets, ranks=None, gpus=None)
    return [(problem.code, problem.path, problem.message) for problem in caught.value.problems]


def test_two_parts_of_one_name_hide_nothing() -> None:
    found = told(TWICE, "rollout.samples_per_prompt=1", "data.train.path=nowhere.jsonl")
    assert sorted((code, path) for code, path, _ in found) == [
        ("group-of-one", "rollout.samples_per_prompt"),
        ("part-names", "rewards.default.parts[1]"),
        ("recipe", "data.train[0].path"),
        ("recipe", "rewards.default.parts[0].python"),
        ("recipe", "rewards.default.parts[1].python"),
    ]


def test_a_function_that_is_not_there_hides_nothing_either() -> None:
    found = told("rewards.default=[{python: 'there:f'}]", "data.train.path=nowhere.jsonl")
    assert sorted(path for _, path, _ in found) == ["data.train[0].path", "rewards.default.parts[0].python"]


@pytest.mark.parametrize("train", ["path: org/name", "python: 'nowhere:rows'"])
def test_data_that_do_not_lie_here_are_not_waited_for(train: str) -> None:
    found = told(TWICE, f"data.train={{{train}}}", *(["data.train.path=null"] if "python" in train else []))
    assert {path for _, path, _ in found} == {f"rewards.default.parts[{index}]{end}" for index, end in ((0, ".python"), (1, ""), (1, ".python"))}


def test_values_that_cannot_be_read_stop_the_look_further() -> None:
    """What the rest means is not known then."""
    found = told(TWICE, "rollout.samples_per_promt=1")
    assert {code for code, _, _ in found} == {"part-names", "unknown-key"}


def test_what_is_wrong_with_the_data_is_told_beside_rules() -> None:
    Path("train.jsonl").write_text('{"prompt": "1+1="}\n')
    found = told("rollout.temperature=0")
    assert {code for code, _, _ in found} == {"recipe", "greedy-training"}
    assert any("without a reference" in message for _, _, message in found)


def breaches() -> list[tuple[str, list[str], str, str]]:
    place = Path(__file__).resolve().parents[1] / "recipe/test_rules.py"
    spec = importlib.util.spec_from_file_location("rules_to_break", place)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BREACHES


def test_whatever_rule_is_broken_the_look_further_says_nothing_twice() -> None:
    """Every breach of every rule that there is a test of: found, with nothing told twice, and no error but the recipe's."""
    for code, sets, path, message in breaches():
        found = told(*sets)
        assert any(one == code and at == path and message in text for one, at, text in found), (code, sets, found)
        assert len({(at, text) for _, at, text in found}) == len(found), (code, sets, found)


def test_unsound_rules_are_rules() -> None:
    assert set(RULES) >= UNSOUND


ROWS = [{"prompt": "1+1=", "answer": "2", "kind": "sum"}, {"prompt": "2*2=", "answer": "4", "kind": "product"}]


def rows(count: int) -> None:
    Path("train.jsonl").write_text("".join(json.dumps(ROWS[index % 2]) + "\n" for index in range(count)))


def test_a_sampled_label_that_no_row_has() -> None:
    rows(4)
    by_label = ("data.train.columns={label: kind}", "rollout.by_label={sum: {temperature: 0.5}, sums: {temperature: 2.0}}")
    found = told(*by_label)
    assert found == [("recipe", "rollout.by_label.sums", "no training row has the label `sums`")]


def test_a_sampled_label_that_the_first_rows_do_not_have_is_a_warning() -> None:
    """The other rows may have it: the plan reads them."""
    rows(1002)
    by_label = ("data.train.columns={label: kind}", "rollout.by_label.sums={temperature: 2.0}")
    warnings = validate(Path("r.yaml"), by_label, ranks=None, gpus=None).warnings
    assert "none of the first 1000 training rows has the label `sums` of rollout.by_label; they have product, sum" in warnings


@pytest.mark.parametrize(
    ("sets", "path"),
    [
        (("rollout.max_new_tokens=4096",), "rollout.max_new_tokens"),
        (("rollout.max_new_tokens=8", "rollout.by_label.default.max_new_tokens=8", "rollout.max_prompt_tokens=4096"), "rollout.max_new_tokens"),
        (("rollout.max_new_tokens=8", "data.eval={e: {path: train.jsonl, sampling: {max_new_tokens: 4096}}}"), "data.eval.e.sampling.max_new_tokens"),
        (("rollout.max_new_tokens=auto", "rollout.max_prompt_tokens=4096"), "rollout.max_new_tokens"),
    ],
)
def test_lengths_beyond_the_positions_of_a_model_on_this_machine(sets: tuple[str, ...], path: str) -> None:
    found = told("models.policy.path=builtin:quickstart", "rollout.max_prompt_tokens=16", *sets)
    places = {at: message for _, at, message in found}
    assert path in places and "4096" in places[path] and "the model has " in places[path]
