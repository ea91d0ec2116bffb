"""Every key of the language, misspelt: one problem, under the word, with the word that was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rftcli.recipe.explain import explain
from rftcli.recipe.kinds import fields_of, key_table, keys, pattern_of
from rftcli.recipe.layers import shipped_recipes
from rftcli.recipe.load import load_text
from rftcli.recipe.names import OTHER_NAMES, closest, did_you_mean, similarity, suggest_key
from rftcli.recipe.not_yet import key_reason
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Place, Problem, Source
from rftcli.recipe.sections import Recipe
from rftcli.recipe.tree import Mapping, Node, Sequence, compose

Problems = Callable[..., list[Problem]]


def written_keys(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Place]]:
    """Keys of the language in a tree, not the names a person chose."""
    if isinstance(node, Mapping):
        for name, entry in node.entries.items():
            if pattern_of((*path, name)) in key_table():
                yield (*path, name), entry.key
            yield from written_keys(entry.value, (*path, name))
    elif isinstance(node, Sequence):
        for index, item in enumerate(node.items):
            yield from written_keys(item, (*path, index))


def misspellings(path: KeyPath) -> list[str]:
    """One with two letters swapped and one with a letter dropped, both unknown words, from the middle of the key where that is possible."""
    word = str(path[-1])
    section = pattern_of(path[:-1])
    middle = len(word) // 2
    places = sorted(range(len(word)), key=lambda i: abs(i - middle))
    swapped = [word[: i - 1] + word[i] + word[i - 1] + word[i + 1 :] for i in places if i > 0]
    dropped = [word[:i] + word[i + 1 :] for i in places]

    def unknown(text: str) -> bool:
        return bool(text) and (*section, text) not in key_table() and key_reason((*section, text)) is None

    return [next(text for text in texts if unknown(text)) for texts in (swapped, dropped)]


EXCLUDED_BY_OTHERS = {
    ("models", "policy", "lora", "start_from"),
    ("train", "data_passes"),
    ("rollout", "hf", "batch_tokens"),
    *(("rollout", "over_sample", *key) for key in ((), ("factor",), ("slice_tokens",))),
    ("rollout", "partial"),
    ("rollout", "partial", "budget_tokens"),
    ("rollout", "max_version_lag"),
    ("rollout", "keep"),
    ("rollout", "keep", "best"),
    ("rollout", "keep", "worst"),
    ("data", "curriculum", "python"),
    ("data", "curriculum", "options"),
    ("rollout", "structured"),
    ("rollout", "structured", "regex"),
    ("rollout", "structured", "json_schema"),
    ("algorithm", "loss", "python"),
    ("algorithm", "loss", "correction"),
    *(("algorithm", "loss", "correction", key) for key in ("kind", "level", "cap", "band", "gate", "bound", "batch_normalise", "reject")),
    *(("algorithm", "loss", "correction", "reject", key) for key in ("by", "band", "bound")),
    *(("algorithm", "advantage", key) for key in ("min_std", "passk_std", "baseline", "python", "options")),
    *(("rollout", "vllm", "server", key) for key in (
        "urls", "start", "weights", "folder", "timeout_seconds", "ready_seconds", "retries", "headers_env",
    )),
    *(("rollout", "vllm", "server", "start", key) for key in ("servers", "gpus", "command")),
    *(("models", "teacher", "placement", *key) for key in ((), ("gpus",), ("memory_share",), ("ready_seconds",), ("command",), ("options",))),
    *(("models", "teacher", key) for key in ("server", "api", "served_model", "timeout_seconds", "retries", "concurrency", "headers_env")),
}
"""Keys that do not go together with what stands in the full recipe."""


def test_the_full_recipe_has_every_key(full: str) -> None:
    root = compose(Source("full", full, "/"), [])
    assert root is not None
    written = {pattern_of(path) for path, _ in written_keys(root)}
    assert written | EXCLUDED_BY_OTHERS >= {key.pieces for key in keys() if key.pieces[:2] != ("data", "eval")}
    assert load_text(full, env={}).recipe.track.wandb is not None


def test_every_key_misspelt(full: str, problems_of: Problems) -> None:
    root = compose(Source("full", full, "/"), [])
    assert root is not None
    lines = full.split("\n")
    seen: set[tuple[str, ...]] = set()
    for path, place in written_keys(root):
        if pattern_of(path) in seen or path == ("extends",):
            continue
        seen.add(pattern_of(path))
        word = str(path[-1])
        for wrong in misspellings(path):
            line = lines[place.line - 1]
            changed = line[: place.column - 1] + wrong + line[place.column - 1 + len(word) :]
            found = problems_of("\n".join([*lines[: place.line - 1], changed, *lines[place.line :]]))
            assert [item.code for item in found] == ["unknown-key"], (path, wrong, found)
            (problem,) = found
            assert problem.message == f"unknown key `{wrong}`"
            assert problem.path == format_path(path[:-1])
            assert problem.place is not None
            assert (problem.place.line, problem.place.column, problem.place.length) == (place.line, place.column, len(wrong))
            assert problem.label is not None and f"`{word}`" in problem.label, (path, wrong, problem.label)
            assert word in problem.allowed
    assert len(seen) > 100


@pytest.mark.parametrize("recipe", sorted(shipped_recipes().glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_of_the_shipped_recipes_misspelt(recipe: Path, problems_of: Problems) -> None:
    text = recipe.read_text()
    root = compose(Source(recipe.name, text, "/"), [])
    assert root is not None
    lines = text.split("\n")
    places = {(place.line, place.column): (path, place) for path, place in written_keys(root)}  # an alias repeats its anchor's places
    for path, place in places.values():
        word = str(path[-1])
        for wrong in misspellings(path):
            line = lines[place.line - 1]
            changed = line[: place.column - 1] + wrong + line[place.column - 1 + len(word) :]
            found = problems_of("\n".join([*lines[: place.line - 1], changed, *lines[place.line :]]))
            hits = [item for item in found if item.message == f"unknown key `{wrong}`"]
            assert hits, (path, wrong, found)
            assert all(item.place is not None and (item.place.line, item.place.column) == (place.line, place.column) for item in hits)
            assert all(item.label is not None and f"`{word}`" in item.label for item in hits), (path, wrong, hits)
    assert len(places) >= 12


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ("train: {steps: 1, lr: 1e-5}", "`lr` belongs in train.optimizer"),
        ("rollout: {learning_rate: 1e-5}", "did you mean `train.optimizer.lr`?"),
        ("rollout: {num_generations: 8}", "did you mean `samples_per_prompt`?"),
        ("rollout: {temp: 1}", "did you mean `temperature`?"),
        ("rollout: {max-new-tokens: 8}", "did you mean `max_new_tokens`?"),
        ("rollout: {Temperature: 1}", "did you mean `temperature`?"),
        ("rollout: {top_: 1}", "did you mean `top_p` or `top_k`?"),
        ("rollout: {vllm: {srver: {}}}", "did you mean `server`?"),
        ("rollout: {max_version_lg: 0}", "did you mean `max_version_lag`?"),
        ("data: {train: {path: train.jsonl}, imagse: {}}", "did you mean `images`, which is not yet supported?"),
        ("temperature: 1", "`temperature` belongs in rollout or eval"),
        ("rollout.temperature: 1", "write it as a section: `rollout: {temperature: ...}`"),
        ("algorithm: {seed: 1}", "`seed` belongs in the top level"),
        ("algorithm: {advantage: {normalize_std: true}}", "did you mean `normalise_std`?"),
        ("rollout: {qqqq: 1}", None),
    ],
)
def test_what_was_meant(minimal: str, problems_of: Problems, written: str, label: str | None) -> None:
    section = written.partition(":")[0] + ": "
    text = "".join(line for line in minimal.splitlines(keepends=True) if not line.startswith(section))
    assert [item.label for item in problems_of(text + written)] == [label]


KINDS = (
    "grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gpg", "grpo_passk", "gdpo", "cpgd", "gae", "distill",
    "python",
)  # fmt: skip


def test_a_misspelt_value(minimal: str, problems_of: Problems) -> None:
    (problem,) = problems_of(minimal + "algorithm: {advantage: {kind: gppo}}")
    assert (problem.message, problem.label, problem.allowed) == ("unknown value `gppo`", "did you mean `grpo` or `gdpo`?", KINDS)
    (problem,) = problems_of(minimal + "batch: {micro_batch_size: auot}")
    assert (problem.message, problem.label) == ("must be auto or an integer, got `auot`", "did you mean `auto`?")


def test_unknown_keys_hide_nothing_else(minimal: str, problems_of: Problems) -> None:
    found = problems_of(minimal + "notes: mine\nrollout: {samples_per_prompt: 1, foo: 2}\nbatch: {epochs: 0}")
    assert [item.code for item in found] == ["unknown-key", "group-of-one", "unknown-key", "wrong-value"]


def test_nearness() -> None:
    assert similarity("lr", "rl") == 0.9 and similarity("a", "b") == 0.0 and similarity("Top-P", "top_p") == 1.0
    assert closest("weigt", ["weight", "width"]) == ["weight"] and closest("xyz", ["weight"]) == [] and closest("x", []) == []
    assert did_you_mean("xyz", ["weight"]) is None


def test_a_suggestion_names_the_path_that_was_meant() -> None:
    known = tuple(fields_of(Recipe))
    assert suggest_key((), "rolout", known).meant == (("rollout",),)
    assert suggest_key((), "temperature", known).meant == (("rollout", "temperature"), ("eval", "temperature"))
    assert suggest_key((), "qqqq", known).meant == ()


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("data: {train: chat.jsonl}", "did you mean `{path: chat.jsonl}`?"),
        ("data: {train: 'a, b.jsonl'}", "did you mean `{path: 'a, b.jsonl'}`?"),
        ("data: {train: {path: t}, eval: {test: t.jsonl}}", "did you mean `{path: t.jsonl}`?"),
        ("data: {train: 3}", None),
    ],
)
def test_a_path_in_the_place_of_a_set(problems_of: Problems, minimal: str, line: str, label: str | None) -> None:
    (problem,) = problems_of(minimal.replace("data: {train: {path: train.jsonl}}", line))
    assert problem.code == "wrong-value" and problem.label == label


def test_a_policy_written_as_its_path(problems_of: Problems, minimal: str) -> None:
    (problem,) = problems_of(minimal.replace("{path: org/model}", "org/model"))
    assert (problem.path, problem.label) == ("models.policy", "did you mean `{path: org/model}`?")


def test_hints_name_topics_that_exist(problems_of: Problems, minimal: str) -> None:
    """An option's name and an index are no topic; brackets would be a shell's."""
    text = minimal.replace("{default: [{rule: exact}]}", "{add: [{rule: exact, options: {befor: x}}, {weight: 2}], default: []}")
    found = problems_of(text, known_rules={"exact": ("after",)})
    assert [item.hint for item in found] == [f"`rft explain rewards.LABEL.parts{end}`" for end in (".options", "", "")]
    for item in found:
        assert explain(str(item.hint).split("`")[1].removeprefix("rft explain ")).startswith("rewards.LABEL.parts")


@pytest.mark.parametrize(("name", "patterns"), OTHER_NAMES.items())
def test_names_of_other_tools_lead_to_keys_that_there_are(name: str, patterns: tuple[str, ...]) -> None:
    there = {key.pattern for key in keys()}
    assert patterns and set(patterns) <= there
    assert name not in there


@pytest.mark.parametrize(
    ("section", "name"),
    [(("algorithm",), "adv_estimator"), (("batch",), "ppo_mini_batch_size"), (("batch",), "rollout_batch_size"), (("rollout",), "tp"),
     (("train",), "optimizer_offload"), (("algorithm",), "loss_type")],
)  # fmt: skip
def test_another_tools_name_goes_before_a_key_that_is_spelt_like_it(section: tuple[str, ...], name: str) -> None:
    known = [key.pieces[-1] for key in keys() if key.pieces[:-1] == section]
    assert {".".join(key) for key in suggest_key(section, name, known).meant} == set(OTHER_NAMES[name])
