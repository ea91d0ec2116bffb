"""`rft explain`, the JSON schema for editors, and a recipe written out whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.errors import UsageError
from rftcli.recipe.explain import CODES, explain
from rftcli.recipe.kinds import keys
from rftcli.recipe.load import load_text
from rftcli.recipe.not_yet import KEYS
from rftcli.recipe.rules import RULES
from rftcli.recipe.schema import as_yaml, json_schema, resolved_yaml
from rftcli.recipe.sections import Recipe


def test_a_key() -> None:
    assert explain("rollout.samples_per_prompt") == (
        "rollout.samples_per_prompt\n\n"
        "  Completions of each prompt: the size of a group.\n\n"
        "  takes    an integer, at least 1\n"
        "  default  8\n"
        "  rule     group-of-one: An estimator that compares within the group needs two samples.\n"
    )


def test_a_required_key_and_one_with_values_to_come() -> None:
    assert "default  none: the key is needed" in explain("models.policy.path")
    text = explain("rollout.engine")
    assert "takes    auto, hf, fake, vllm or sglang\n" in text and "not yet  diffusers\n" in text


@pytest.mark.parametrize("path", ["data.train.path", "data.train[].path", "data.train[3].path", "data.train.0.path"])
def test_indexes_may_be_left_out(path: str) -> None:
    assert explain(path).startswith("data.train[].path\n")


@pytest.mark.parametrize(
    ("path", "title", "member"),
    [
        ("rollout", "rollout", "temperature"),
        ("rewards", "rewards", "parts"),
        ("rewards.math", "rewards.LABEL", "combine"),
        ("rewards.math.parts", "rewards.LABEL.parts", "on_error"),
        ("data.eval.gsm8k", "data.eval.NAME", "samples_per_prompt"),
        ("data.train[0]", "data.train[]", "weight"),
        ("track.wandb", "track.wandb", "project"),
    ],
)
def test_sections_list_their_keys(path: str, title: str, member: str) -> None:
    lines = explain(path).splitlines()
    assert lines[0] == title and any(line.split()[:1] == [member] for line in lines)


def test_every_key_rule_and_code_has_a_page() -> None:
    for key in keys():
        page = explain(key.pattern)
        assert page.startswith(f"{key.pattern}\n\n  {key.info.description}\n") and page.endswith("\n")
    assert not {*RULES, *CODES} & {key.pattern for key in keys()} and not set(RULES) & set(CODES)
    for code in (*RULES, *CODES):
        assert explain(code).startswith(f"{code}\n\n  ")
    for pattern in KEYS:
        assert "Not yet supported: " in explain(pattern)
    assert explain("data.images.min_pixels") == "data.images.min_pixels\n\n  Not yet supported: only text is trained.\n"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("rollout.temp", "did you mean `rollout.temperature`?"),
        ("lr", "did you mean `models.critic.optimizer.lr` or `train.optimizer.lr`?"),
        ("train.stps", "did you mean `train.steps`?"),
        ("group-of-on", "did you mean `group-of-one`?"),
        ("rewards.math.parts.wieght", "did you mean `rewards.LABEL.parts[].weight`?"),
        ("reward", "did you mean `rewards` or `reward_shaping` or `eval.rewards`?"),
        ("path", "did you mean `models.policy.path` or `models.scorers.NAME.path` or `models.teacher.path` or `data.train[].path` or "
         "`data.eval.NAME.path` or `train.supervised.data.path`?"),
        ("temperatur", "did you mean `models.scorers.NAME.temperature` or `data.eval.NAME.sampling.temperature` or `rollout.temperature` or "
         "`rollout.by_label.LABEL.temperature` or `eval.temperature`?"),
        ("passes", "did you mean `train.data_passes`?"),
        ("zzzz", "`rft explain` lists the sections, `rft explain rollout` a section's keys"),
    ],
)
def test_what_is_not_there(path: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain(path)
    assert caught.value.hint == hint and caught.value.exit_code == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    summary: str
    options: Mapping[str, Any]

    @property
    def words(self) -> Mapping[str, tuple[str, str]]:
        return {name: ("a thing", f"What {name} is.") for name in self.options}


REWARDS = {
    "same": Row(summary="1 if equal", options={"after": None, "limit": "(required)", "read": ("a", "b")}),
    "plain": Row(summary="always 1", options={}),
}


def test_a_reward_rule() -> None:
    assert explain("same", REWARDS) == (
        "same\n\n"
        "  1 if equal.\n\n"
        "  is  a reward rule, as in `rewards: {default: [{rule: same}]}`\n\n"
        "  after  default null    a thing - What after is.\n"
        "  limit  needed          a thing - What limit is.\n"
        "  read   default [a, b]  a thing - What read is.\n"
    )
    assert explain("plain", REWARDS).endswith("[{rule: plain}]}`\n")
    page = explain("rewards.default.parts.rule", REWARDS)
    assert page.startswith("rewards.LABEL.parts[].rule\n") and page.endswith("\n\n  same   1 if equal\n  plain  always 1\n")
    assert explain("rules", REWARDS) == explain("rule", REWARDS) == page
    with pytest.raises(UsageError) as caught:
        explain("plian", REWARDS)
    assert caught.value.hint == "did you mean `plain`?"


def test_without_a_topic_the_sections() -> None:
    lines = explain().splitlines()
    assert [line.split()[0] for line in lines[4 : 4 + len(Recipe.model_fields)]] == list(Recipe.model_fields)
    assert lines[4 + len(Recipe.model_fields)] == "" and lines[5 + len(Recipe.model_fields)].startswith("  presets: ")
    assert f"  rollout         {Recipe.model_fields['rollout'].description}" in lines


@pytest.mark.parametrize("path", ["", "a[", "seed.deep", "models.policy.options.x", "data.train.path.x", "."])
def test_strange_paths_are_usage_errors(path: str) -> None:
    with pytest.raises(UsageError):
        explain(path)


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from nodes(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from nodes(value)


def test_the_schema_has_every_key_with_its_meaning() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["else"]["required"] == ["models", "data", "rewards"]
    texts = {node["description"] for node in nodes(schema) if isinstance(node.get("description"), str)}
    assert {key.info.description for key in keys()} <= texts
    for node in nodes(schema):
        if node.get("type") == "object" and "properties" in node:
            assert node["additionalProperties"] is False
    assert "from" in schema["$defs"]["ReferenceModel"]["properties"]


def test_the_schema_takes_short_forms() -> None:
    schema = json_schema()
    assert {"type": "array", "items": {"$ref": "#/$defs/RewardPart"}} in schema["properties"]["rewards"]["additionalProperties"]["anyOf"]
    assert {"$ref": "#/$defs/TrainSource"} in schema["$defs"]["Data"]["properties"]["train"]["anyOf"]
    assert {"type": "string", "minLength": 1} in schema["properties"]["extends"]["anyOf"]


def test_needed_keys_may_come_from_a_parent() -> None:
    """No `required` is in force in a recipe with `extends`; without one, every needed key is listed where it is."""
    schema = json_schema()
    assert schema["if"] == {"required": ["extends"]} and "then" not in schema
    needed = schema.pop("else")
    schema.pop("if")
    assert not [node for node in nodes(schema) if isinstance(node.get("required"), list)]
    assert needed["properties"]["models"] == {
        "required": ["policy"],
        "properties": {
            "policy": {"required": ["path"]},
            "scorers": {"additionalProperties": {"required": ["kind"]}},
            "teacher": {"properties": {"placement": {"required": ["gpus"]}}},
        },
    }
    assert needed["properties"]["data"] == {"required": ["train"]}
    of_combine = {"combine": {"required": ["python"]}}  # where it is a mapping
    assert needed["properties"]["rewards"] == {"additionalProperties": {"required": ["parts"], "properties": of_combine}}
    assert needed["properties"]["eval"] == {"properties": {"rewards": needed["properties"]["rewards"]}}
    assert needed["properties"]["train"] == {"properties": {"early_stop": {"required": ["metric"]}, "supervised": {"required": ["data"]}}}
    assert needed["properties"]["checkpoint"] == {"properties": {"keep_best": {"required": ["metric"]}}}
    assert needed["properties"]["algorithm"] == {"properties": {"loss": {"properties": {"entropy_controller": {"required": ["target"]}}}}}
    assert needed["properties"]["reward_shaping"] == {"properties": {"overlong": {"required": ["buffer"]}}}
    assert set(needed["properties"]) == {"reward_shaping", "models", "data", "rewards", "train", "eval", "checkpoint", "algorithm"}


def test_the_schema_may_list_reward_rules() -> None:
    def rule(schema: dict[str, Any]) -> list[dict[str, Any]]:
        return schema["$defs"]["RewardPart"]["properties"]["rule"]["anyOf"]

    assert rule(json_schema()) == [{"type": "string", "minLength": 1}, {"type": "null"}]
    assert rule(json_schema(REWARDS)) == [{"type": "string", "minLength": 1, "enum": ["plain", "same"]}, {"type": "null"}]


def test_a_resolved_recipe_reads_as_the_same(full: str) -> None:
    loaded = load_text(full, env={})
    written = resolved_yaml(loaded)
    again = load_text(written, env={})
    assert again.recipe.model_copy(update={"extends": ()}) == loaded.recipe.model_copy(update={"extends": ()})
    assert resolved_yaml(again) == written
    plain = yaml.safe_load(written)
    assert plain["train"]["optimizer"]["lr"] == 1e-5, "a number to other readers of YAML too"
    assert "extends" not in plain


def test_origins_are_comments(minimal: str) -> None:
    loaded = load_text(minimal, sets=["rollout.stop=[a, b]"], env={})
    lines = resolved_yaml(loaded, origins=True).splitlines()
    comments = {line.split(":")[0].strip(): line.rpartition("# ")[2] for line in reversed(lines) if "# " in line}  # the first of a name counts
    assert comments["combine"] == "default" and comments["- rule"] == "recipe:3:28" and "rewards.default.combine" not in loaded.origins
    assert comments["steps"] == "recipe:4:16" and comments["stop"] == "--set 1:1:15" and comments["top_k"] == "default"
    assert load_text("\n".join(lines), env={}).recipe == loaded.recipe


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(bool), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(options=st.dictionaries(TEXT.filter(bool), VALUE, max_size=3), system=TEXT)
def test_any_value_survives_being_written_and_read(options: dict[str, Any], system: str) -> None:
    recipe = (
        f"models: {{policy: {{path: m, options: {as_yaml(options)}, chat: {{system: {as_yaml(system)}}}}}}}\n"
        "data: {train: {path: t}}\nrewards: {default: [{rule: r}]}\ntrain: {steps: 1}\n"
    )
    loaded = load_text(recipe, env={})
    assert loaded.recipe.models.policy.options == options and loaded.recipe.models.policy.chat.system == system
    assert load_text(resolved_yaml(loaded, origins=True), env={}).recipe == loaded.recipe
