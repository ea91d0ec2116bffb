"""`extends`: order, merging, removal, paths, cycles, and what stays with the file that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rftcli.errors import RecipeError
from rftcli.recipe.load import LoadedRecipe, load_recipe, load_text
from rftcli.recipe.problems import Problem
from rftcli.recipe.schema import resolved_yaml

Write = Callable[[str, str], Path]


def load(path: Path, **arguments: object) -> LoadedRecipe:
    return load_recipe(path, env={"HOME": str(path.parent)}, **arguments)  # type: ignore[arg-type]


def refused(path: Path, **arguments: object) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load(path, **arguments)
    return list(caught.value.problems)  # type: ignore[arg-type]


def test_left_to_right_and_the_file_itself_last(write: Write, minimal: str) -> None:
    write("a.yaml", minimal + "rollout: {temperature: 0.1, top_k: 1}\nseed: 1\n")
    write("b.yaml", "rollout: {temperature: 0.2, top_k: 2}\n")
    loaded = load(write("c.yaml", "extends: [a.yaml, ./b]\nrollout: {temperature: 0.3}\n"))
    rollout = loaded.recipe.rollout
    assert (rollout.temperature, rollout.top_k, loaded.recipe.seed) == (0.3, 2, 1)
    folder = loaded.shown.rpartition("/")[0]
    assert str(loaded.origin("rollout.temperature")) == f"{folder}/c.yaml:2:24"
    assert str(loaded.origin("rollout.top_k")) == f"{folder}/b.yaml:1:36"
    assert str(loaded.origin("rollout.top_p")) == "default"
    assert loaded.recipe.extends == ("a.yaml", "./b") and "extends" not in loaded.raw


def test_lists_replace_and_null_removes(write: Write, minimal: str) -> None:
    write("a.yaml", minimal + "rollout: {stop: [a, b], top_k: 5}\nalgorithm: {loss: {dual_clip: 3}}\nbatch: {epochs: 4}\n")
    child = write("c.yaml", "extends: a.yaml\nrollout: {stop: [c], top_k: null}\nalgorithm: {loss: {dual_clip: ~}}\nbatch: null\n")
    loaded = load(child)
    assert loaded.recipe.rollout.stop == ("c",) and loaded.recipe.rollout.top_k == 0
    assert loaded.recipe.algorithm.loss.dual_clip is None and loaded.recipe.batch.epochs == 1
    assert loaded.raw["rollout"] == {"stop": ["c"]} and "batch" not in loaded.raw


def test_null_stays_where_it_has_a_meaning(write: Write, minimal: str) -> None:
    """`max_grad_norm: null` switches clipping off: it must not fall back to the default 1.0, whoever wrote what before."""
    assert load(write("a.yaml", minimal)).recipe.train.max_grad_norm == 1.0
    write("half.yaml", minimal.replace("steps: 10", "steps: 10, max_grad_norm: 0.5"))
    off = load(write("c.yaml", "extends: half.yaml\ntrain: {max_grad_norm: null}\n"))
    assert off.recipe.train.max_grad_norm is None and off.raw["train"]["max_grad_norm"] is None
    assert load_text(resolved_yaml(off), env={}).recipe.train == off.recipe.train
    assert load(write("d.yaml", "extends: [half.yaml, c.yaml]\n")).recipe.train.max_grad_norm is None
    assert load(write("e.yaml", "extends: c.yaml\ntrain: {max_grad_norm: 2}\n")).recipe.train.max_grad_norm == 2.0
    assert load(write("f.yaml", "extends: c.yaml\ntrain: {steps: 3}\n")).recipe.train.max_grad_norm is None
    assert load(write("g.yaml", "extends: half.yaml\n"), sets=["train.max_grad_norm=null"]).recipe.train.max_grad_norm is None


@pytest.mark.parametrize("extends", ["", "extends: a.yaml\n"])
def test_an_unfinished_line_does_not_switch_clipping_off(write: Write, minimal: str, extends: str) -> None:
    write("a.yaml", minimal.replace("steps: 10", "steps: 10, max_grad_norm: 0.5"))
    (problem,) = refused(write("c.yaml", extends + minimal.replace("{steps: 10}", "\n  steps: 10\n  max_grad_norm:\n")))
    assert (problem.code, problem.path, problem.message) == ("empty-value", "train.max_grad_norm", "nothing stands here")
    assert problem.place is not None and problem.place.text == "  max_grad_norm:"


def test_a_bare_key_over_an_inherited_value_is_refused(write: Write, minimal: str) -> None:
    base = write("a.yaml", minimal + "rollout:\n  top_k: 5\n")
    (problem,) = refused(write("c.yaml", "extends: a.yaml\nrollout:\n#  temperature: 1\n"))
    assert (problem.code, problem.path, problem.label) == ("empty-value", "rollout", f"{base}:5:1 wrote a value")


def test_reward_shorthand_replaces_a_long_entry(write: Write, minimal: str) -> None:
    write("a.yaml", minimal.replace("[{rule: exact}]", "{combine: sum, parts: [{rule: exact}, {rule: near}]}"))
    loaded = load(write("c.yaml", "extends: a.yaml\nrewards: {default: [{rule: other}], math: [{rule: exact}]}\n"))
    assert {label: [part.rule for part in reward.parts] for label, reward in loaded.recipe.rewards.items()} == {
        "default": ["other"],
        "math": ["exact"],
    }


def test_a_child_may_change_one_key_of_its_parents_only_set(write: Write, minimal: str) -> None:
    write("a.yaml", minimal.replace("path: train.jsonl", "path: train.jsonl, columns: {prompt: question}"))
    (source,) = load(write("c.yaml", "extends: a.yaml\ndata: {train: {path: other.jsonl}}\n")).recipe.data.train
    assert source.path is not None and source.path.endswith("/other.jsonl") and source.columns.prompt == "question"


def test_paths_belong_to_the_file_that_wrote_them(write: Write, minimal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("shared/base.yaml", minimal.replace("train.jsonl", "../rows/train.jsonl"))
    write("shared/mid.yaml", "extends: base\n")
    child = write("mine/c.yaml", "extends: ../shared/mid.yaml\ndata: {eval: {test: {path: test.jsonl}}}\n")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    recipe = load(child, sets=["data.eval.other.path=mine.jsonl"]).recipe
    assert recipe.data.train[0].path == f"{tmp_path}/rows/train.jsonl"
    assert recipe.data.eval["test"].path == f"{tmp_path}/mine/test.jsonl"
    assert recipe.data.eval["other"].path == f"{tmp_path}/cwd/mine.jsonl"


def test_models_are_directories_only_if_they_exist(write: Write, minimal: str, tmp_path: Path) -> None:
    (tmp_path / "org" / "here").mkdir(parents=True)
    (tmp_path / "policy").mkdir()

    def path(text: str) -> str:
        return load(write("m.yaml", minimal.replace("org/model", text))).recipe.models.policy.path

    assert path("org/model") == "org/model"
    assert path("org/here") == f"{tmp_path}/org/here"
    assert path("./missing") == f"{tmp_path}/missing"
    assert path("builtin:tiny") == "builtin:tiny"
    assert path("~/weights") == f"{tmp_path}/weights"
    assert path("/abs/olute") == "/abs/olute"
    reference = load(write("m.yaml", minimal.replace("{policy:", "{reference: {from: policy}, policy:"))).recipe.models.reference.from_
    assert reference == "policy", "the word, although a directory of that name exists"


def test_templates_and_output_directories(write: Write, minimal: str, tmp_path: Path) -> None:
    def template(text: str) -> str | None:
        return load(write("m.yaml", minimal.replace("org/model", f"org/model, chat: {{template: {text}}}"))).recipe.models.policy.chat.template

    assert template("chat.jinja") == f"{tmp_path}/chat.jinja"
    assert template("'{{ x }}'") == "{{ x }}"
    tensorboard = load(write("m.yaml", minimal + "track: {tensorboard: tb}")).recipe.track.tensorboard
    assert tensorboard == "tb", "where it lies is the run's business"
    assert load(write("m.yaml", minimal + "track: {tensorboard: ~/tb}")).recipe.track.tensorboard == f"{tmp_path}/tb"
    assert load(write("m.yaml", minimal + "track: {tensorboard: yes}")).recipe.track.tensorboard is True


def test_presets_lie_in_the_shipped_folder(write: Write, minimal: str, tmp_path: Path) -> None:
    write("shipped/presets/dapo.yaml", "algorithm: {loss: {clip_high: 0.28}}\n")
    child = write("mine/c.yaml", "extends: [presets/dapo]\n" + minimal)
    assert load(child, shipped=tmp_path / "shipped").recipe.algorithm.loss.clip_high == 0.28
    (problem,) = refused(write("mine/d.yaml", "extends: [presets/dopa]\n" + minimal), shipped=tmp_path / "shipped")
    assert problem.label == "No such file or directory" and problem.hint == "did you mean `presets/dapo`?"
    assert problem.place is not None and (problem.place.line, problem.place.column, problem.place.length) == (1, 11, 12)


def test_a_name_without_a_file_is_a_shipped_recipe(write: Write, minimal: str, tmp_path: Path) -> None:
    write("shipped/quick.yaml", minimal)
    shipped = tmp_path / "shipped"
    loaded = load(write("mine/c.yaml", "extends: [quick]\nseed: 3\n"), shipped=shipped)
    assert (loaded.recipe.train.steps, loaded.recipe.seed) == (10, 3)
    assert loaded.recipe.data.train[0].path == f"{shipped}/train.jsonl"
    assert str(loaded.origin("train.steps")) == f"{shipped}/quick.yaml:4:16"
    for text, hint in (("quikc", "did you mean `quick`?"), ("zzz", "shipped recipes: quick")):
        (problem,) = refused(write("mine/d.yaml", f"extends: {text}\n"), shipped=shipped)
        assert (problem.code, problem.hint) == ("bad-extends", hint), text
    for path in ("./quick", "quick.yaml", "mine/quick"):
        (problem,) = refused(write("mine/d.yaml", f"extends: {path}\n"), shipped=shipped)
        assert problem.message.startswith("cannot read `"), path
    write("mine/quick.yaml", minimal.replace("10", "20"))
    assert load(tmp_path / "mine" / "c.yaml", shipped=shipped).recipe.train.steps == 20


def test_the_quickstart_can_be_built_on(write: Write) -> None:
    assert load(write("c.yaml", "extends: quickstart\ntrain: {steps: 2}\n")).recipe.train.steps == 2


def test_an_empty_recipe_names_those_to_start_from(write: Write, minimal: str, tmp_path: Path) -> None:
    write("shipped/quick.yaml", minimal)
    (problem,) = refused(write("mine/c.yaml", "# to come\n"), shipped=tmp_path / "shipped")
    assert problem.hint == "shipped recipes to start from, as in `rft train quickstart`: quick"


def test_a_home_and_a_variable_in_extends(write: Write, minimal: str, tmp_path: Path) -> None:
    write("base.yaml", minimal)
    assert load(write("c.yaml", "extends: ~/base.yaml\n")).recipe.train.steps == 10
    child = write("d.yaml", "extends: ['${WHERE}/base.yaml']\n")
    assert load_recipe(child, env={"WHERE": str(tmp_path)}).recipe.train.steps == 10
    (problem,) = refused(child)
    assert problem.message == "environment variable `WHERE` is not set"


def test_cycles_show_their_chain(write: Write) -> None:
    write("b.yaml", "extends: c.yaml\n")
    write("c.yaml", "extends: [b.yaml]\n")
    (problem,) = refused(write("a.yaml", "extends: b.yaml\n"))
    assert problem.message == "the recipe extends itself: b.yaml -> c.yaml -> b.yaml"
    assert problem.place is not None and str(problem.place).endswith("c.yaml:1:11")
    (problem,) = refused(write("self.yaml", "extends: self.yaml\n"))
    assert problem.message == "the recipe extends itself: self.yaml -> self.yaml"


def test_the_same_parent_twice_is_no_cycle(write: Write, minimal: str) -> None:
    write("base.yaml", minimal)
    write("l.yaml", "extends: base.yaml\nseed: 1\n")
    write("r.yaml", "extends: base.yaml\n")
    assert load(write("c.yaml", "extends: [l.yaml, r.yaml]\n")).recipe.seed == 1


def test_many_files_are_refused_once(write: Write, minimal: str) -> None:
    for number in range(8):
        write(f"f{number}.yaml", f"extends: [f{number + 1}, f{number + 1}]\n")
    write("f8.yaml", minimal)
    (problem,) = refused(write("c.yaml", "extends: f0\n"))
    assert problem.message == "more than 50 files are extended"


@pytest.mark.parametrize("value", ["{a: b}", "[[a]]", "[null]", "''"])
def test_extends_takes_paths(write: Write, minimal: str, value: str) -> None:
    (problem,) = refused(write("c.yaml", f"extends: {value}\n" + minimal))
    assert (problem.code, problem.path, problem.message) == ("bad-extends", "extends", "must be the path of a recipe")


def test_nothing_is_called_missing_when_a_parent_is(write: Write) -> None:
    (problem,) = refused(write("c.yaml", "extends: gone.yaml\nseed: 1\n"))
    assert problem.code == "bad-extends" and problem.message.endswith("gone.yaml`")


def test_a_broken_parent_is_shown_with_other_problems(write: Write, minimal: str) -> None:
    write("base.yaml", "a: b: c\n")
    found = refused(write("c.yaml", "extends: base.yaml\nseed: x\n"))
    assert [str(item.place).rpartition("/")[2] for item in found] == ["base.yaml:1:5", "c.yaml:2:7"]


def test_a_text_starts_from_its_base(write: Write, minimal: str, tmp_path: Path) -> None:
    write("base.yaml", minimal)
    loaded = load_text("extends: base.yaml", env={}, base=tmp_path)
    assert loaded.path is None and loaded.recipe.data.train[0].path == f"{tmp_path}/train.jsonl"
