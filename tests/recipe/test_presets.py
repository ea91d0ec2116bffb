"""Presets: each builds on the quickstart, sets what differs from the default or says why it is written, and has a page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rftcli.errors import RecipeError, UsageError
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan
from rftcli.recipe.explain import explain
from rftcli.recipe.kinds import key_table, pattern_of
from rftcli.recipe.layers import preset_names, shipped_recipes
from rftcli.recipe.load import LoadedRecipe, load_recipe
from rftcli.recipe.methods import SHARED_KEYS
from rftcli.recipe.paths import format_path
from rftcli.recipe.presets import SECTIONS, read_preset
from rftcli.recipe.schema import as_yaml, default_of

Write = Callable[[str, str], Path]

NAMES = preset_names(shipped_recipes())
NEEDS = {"ppo": "models: {critic: {}}\n", "distill": "models: {teacher: {path: 'builtin:quickstart'}}\n"}
"""Preset -> what it leaves to the recipe and cannot be without."""
TABLE = Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "presets.md"
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")


@pytest.fixture
def built_on(write: Write) -> Callable[..., LoadedRecipe]:
    def load(*names: str, more: str = "") -> LoadedRecipe:
        extends = ", ".join(["quickstart", *(f"presets/{name}" for name in names)])
        return load_recipe(write("elsewhere/r.yaml", f"extends: [{extends}]\n{more}"), env={})

    return load


def compiled(loaded: LoadedRecipe) -> Plan:
    facts = Facts(machine=MachineFacts(cores=8, memory_gib=16.0), model=ModelFacts(path="/p"), ranks=2, train_rows=100)
    extra = ModelFacts(path="/teacher") if loaded.recipe.models.teacher is not None else None
    return compile_plan(loaded.recipe, facts, name="r", search_path="/recipes", policy_path="/p", teacher=extra)


def test_the_presets_there_are() -> None:
    expected = "cispo cpgd dapo distill dr_grpo gpg grpo gspo ppo reinforce_pp reinforce_pp_baseline remax rloo"
    assert expected.split() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_quickstart_takes_every_preset(built_on: Callable[..., LoadedRecipe], name: str) -> None:
    loaded = built_on(name, more=NEEDS.get(name, ""))
    for setting in read_preset(name).settings:
        origin = loaded.origin(format_path(setting.path)).file
        assert setting.value == "{}" or (origin is not None and origin.endswith(f"presets/{name}.yaml")), setting
    plan = compiled(loaded)
    assert plan.learner is not None and (plan.critic is not None) == (name == "ppo")


@pytest.mark.parametrize("name", NAMES)
def test_a_key_differs_from_its_default_or_says_why_it_is_there(name: str) -> None:
    preset = read_preset(name)
    assert len(preset.settings) > 1
    for setting in preset.settings:
        assert setting.path[0] in SECTIONS
        differs = setting.value != "{}" and setting.value != as_yaml(default_of(key_table()[_key(setting.path)].info))
        assert differs or setting.remark, setting
        assert setting.remark.startswith("the default") <= (not differs), setting


SOURCE = re.compile(r"the paper's|published|'s \(|that of|both papers|not stated there|ours, to suit|\d{4}\.\d{5}|authors'")


@pytest.mark.parametrize("name", NAMES)
def test_a_number_says_where_it_is_from(name: str) -> None:
    """The paper, its authors' program, or that it is ours; but for one answer a prompt and terms that are off, which are what the method is."""
    for setting in read_preset(name).settings:
        if re.fullmatch(r"[-+.\de]+", setting.value) and float(setting.value) != 0 and setting.path[-1] != "samples_per_prompt":
            assert SOURCE.search(setting.remark) or setting.remark.startswith("the default"), setting


def _key(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """The row of the table of keys; what stands in a free mapping belongs to that mapping."""
    pattern = pattern_of(path)
    return pattern if pattern in key_table() else pattern[:-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_header_names_paper_and_what_is_left(name: str) -> None:
    header = read_preset(name).header
    assert ARXIV.search(header[0]) and any(line.startswith("Left to you: ") for line in header)
    assert all(header), "no empty lines"


@pytest.mark.parametrize("name", NAMES)
def test_a_page(name: str) -> None:
    preset, page = read_preset(name), explain(f"preset:{name}")
    assert page.startswith(f"preset:{name}\n\n  {preset.header[0]}\n") and page.endswith(f"presets/{name}.yaml\n")
    for setting in preset.settings:
        assert re.search(rf"^  {re.escape(format_path(setting.path))} +{re.escape(setting.value)}( |$)", page, re.MULTILINE), setting


@pytest.mark.parametrize("name", NAMES)
def test_a_page_names_the_keys_that_there_are_to_turn(name: str) -> None:
    """They exist, and those of the estimator and the loss that the preset sets are among them."""
    estimator, loss = re.findall(r"^ +(?:knobs +)?algorithm\.(?:advantage|loss): (.*)$", explain(f"preset:{name}"), re.MULTILINE)
    for section, listed in (("advantage", estimator), ("loss", loss)):
        keys = listed.split(", ")
        assert len(set(keys)) == len(keys)
        for key in keys:
            assert _key(("algorithm", section, *key.split("."))) in key_table(), key
        own = {".".join(map(str, setting.path[2:])) for setting in read_preset(name).settings if setting.path[:2] == ("algorithm", section)}
        assert own - {"kind"} <= set(keys)


def test_every_estimator_has_its_keys() -> None:
    from rftcli.algo.advantages import ADVANTAGES
    from rftcli.recipe.estimator_rules import OWN_KEYS

    for name, row in ADVANTAGES.items():
        shown = {*SHARED_KEYS.get(name, ()), *(key for key, (kinds, _) in OWN_KEYS.items() if name in kinds)}
        assert len(shown) >= len(row.options), name


def test_the_list_of_topics_names_presets() -> None:
    assert f"presets: {', '.join(NAMES)}. " in explain()


@pytest.mark.parametrize(
    ("topic", "hint"),
    [("preset:dopa", "did you mean `preset:dapo`?"), ("dapo", "did you mean `preset:dapo`?"), ("preset:zzzz", f"presets: {', '.join(NAMES)}")],
)
def test_no_such_page(topic: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain(topic)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("presets/dopa", "did you mean `presets/dapo`?"),
        ("presets/dopa.yaml", "did you mean `presets/dapo`?"),
        ("presets/DrGRPO", "did you mean `presets/dr_grpo`?"),
        ("presets/zzzz", f"presets: {', '.join(NAMES)}"),
        ("dapo", "did you mean `presets/dapo`?"),
    ],
)
def test_a_wrong_name_is_refused(write: Write, written: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write("r.yaml", f"extends: [quickstart, {written}]\n"), env={})
    (problem,) = caught.value.problems
    assert (problem.code, problem.hint) == ("bad-extends", hint)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "word"), [("ppo", "critic"), ("distill", "teacher")])
def test_what_a_preset_leaves_out_is_asked_for(built_on: Callable[..., LoadedRecipe], name: str, word: str) -> None:
    with pytest.raises(RecipeError, match=f"`models: {{{word}"):
        built_on(name)


def test_dapo_in_numbers(built_on: Callable[..., LoadedRecipe]) -> None:
    loaded = built_on("dapo", more="rollout: {max_new_tokens: 20480}\n")
    loss = loaded.recipe.algorithm.loss
    assert (loss.clip_low, loss.clip_high, loss.aggregate) == (0.2, 0.28, "token_mean")
    plan = compiled(loaded)
    assert plan.shaping.overlong_buffer == 4096 and plan.shaping.truncated == "keep"
    shorter = built_on("dapo", more="rollout: {max_new_tokens: 20480, by_label: {default: {max_new_tokens: 100}}}\n")
    assert compiled(shorter).shaping.overlong_buffer == 20, "a fifth of the shortest limit, so that it fits into every label's"
    assert plan.kl is None and plan.rollout is not None and plan.rollout.dynamic is not None


def test_presets_in_a_row(built_on: Callable[..., LoadedRecipe]) -> None:
    """MiniMax-M1: DAPO's refill and penalty under the loss of CISPO. And a preset takes back what the one before it changed."""
    recipe = built_on("dapo", "cispo").recipe
    assert (recipe.algorithm.loss.kind, recipe.algorithm.loss.clip_low, recipe.algorithm.loss.clip_high) == ("cispo", 1.0, 4.0)
    assert recipe.rollout.dynamic is not None and recipe.reward_shaping.overlong is not None
    again = built_on("grpo", "dr_grpo", "gspo").recipe.algorithm
    assert again == built_on("gspo").recipe.algorithm


def test_what_another_loss_does_not_read_is_named_and_can_be_taken_back(built_on: Callable[..., LoadedRecipe]) -> None:
    with pytest.raises(RecipeError, match="has no effect with `reinforce`"):
        built_on("dapo", "gpg")
    taken = built_on("dapo", "gpg", more="algorithm: {loss: {clip_low: null, clip_high: null}}\n").recipe.algorithm.loss
    assert (taken.kind, taken.clip_high) == ("reinforce", 0.2)


def test_the_recipe_itself_has_the_last_word(built_on: Callable[..., LoadedRecipe]) -> None:
    assert built_on("dapo", more="algorithm: {loss: {clip_high: 0.3}}\n").recipe.algorithm.loss.clip_high == 0.3


def test_the_page_of_the_documentation_has_every_preset_and_paper() -> None:
    rows = {line.split("`")[1]: line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")}
    assert sorted(rows) == NAMES
    for name in NAMES:
        assert set(ARXIV.findall("\n".join(read_preset(name).header))) <= set(ARXIV.findall(rows[name])), name
