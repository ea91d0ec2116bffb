"""What YAML or a careless hand makes of a value: read as it was meant, or refused with the fix; never changed in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rftcli.errors import RecipeError
from rftcli.recipe import scalars
from rftcli.recipe.load import load_recipe, load_text
from rftcli.recipe.problems import Problem, Source
from rftcli.recipe.tree import MAX_CHARACTERS, Mapping, Scalar, Sequence, YamlFault, compose

Problems = Callable[..., list[Problem]]


def with_lr(minimal: str, text: str) -> str:
    return minimal.replace("{steps: 10}", f"{{steps: 10, optimizer: {{lr: {text}}}}}")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("5E-6", 5e-6), ("1.0e-5", 1e-5), ("1e-05", 1e-5), (".5", 0.5), ("1", 1.0), ("+1e-3", 1e-3), ("0.000_1", 1e-4), ("1.", 1.0)],
)
def test_numbers_in_every_spelling(minimal: str, text: str, value: float) -> None:
    lr = load_text(with_lr(minimal, text), env={}).recipe.train.optimizer.lr
    assert isinstance(lr, float) and lr == value


@pytest.mark.parametrize(
    ("text", "message", "label"),
    [
        (".nan", "must be a number, got `.nan`", "the number must be finite"),
        (".inf", "must be a number, got `.inf`", "the number must be finite"),
        ("-.INF", "must be a number, got `-.INF`", "the number must be finite"),
        ("nan", "must be a number, got `nan`", "the number must be finite"),
        ("1e999", "must be a number, got `1e999`", "the number is too large"),
        ("-1e-5", "must be above 0, got `-1e-5`", None),
        ("0", "must be above 0, got `0`", None),
        ("1.0e5", "must be at most 1, got `1.0e5`", None),
        ("1e5", "must be at most 1, got `1e5`", None),
        ("1_000", "must be at most 1, got `1_000`", None),
        ('"abc"', "must be a number, got the text `abc`", "write it without quotes"),
        ('"1e-5"', "must be a number, got the text `1e-5`", "write it without quotes"),
        ("abc", "must be a number, got `abc`", None),
        ("1:30", "must be a number, got `1:30`", "YAML 1.1 reads this to the base of 60: write one number"),
        ("010", "must be a number, got `010`", "a leading zero means base 8 to some: write 10 or 0o10"),
        ("09", "must be a number, got `09`", "a leading zero means base 8 to some: write 9"),
        ('"1,000"', "must be a number, got the text `1,000`", "write it without quotes"),
        ("5%", "must be a number, got `5%`", "write 0.05"),
        ("1e-5 per step", "must be a number, got `1e-5 per step`", None),
        ("true", "must be a number, got `true`", None),
        ("null", "must be a number, got null", "leave the key out for its default"),
        ("", "must be a number, got nothing", "leave the key out for its default"),
        ("[1e-5]", "must be a number, got a list", None),
        ("{a: 1}", "must be a number, got a mapping", None),
        ("9" * 60, f"must be a number, got `{'9' * 37}...`", "too long for a number"),
    ],
)
def test_numbers_that_are_none(minimal: str, problems_of: Problems, text: str, message: str, label: str | None) -> None:
    (problem,) = problems_of(with_lr(minimal, text))
    assert (problem.path, problem.message, problem.label) == ("train.optimizer.lr", message, label)
    assert problem.place is not None and problem.place.line == 4


@pytest.mark.parametrize(("text", "value"), [("1_000", 1000), ("1e3", 1000), ("0x10", 16), ("0o17", 15), ("+8", 8), ("1.5e3", 1500)])
def test_whole_numbers(minimal: str, text: str, value: int) -> None:
    steps = load_text(minimal.replace("steps: 10", f"steps: {text}"), env={}).recipe.train.steps
    assert type(steps) is int and steps == value


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("012", "a leading zero means base 8 to some: write 12 or 0o12"),
        ("100.0", "write 100"),
        ("1.5", "not a whole number"),
        ("1e999", "the number is too large"),
        ("1e-3", "not a whole number"),
        ("10:00", "YAML 1.1 reads this to the base of 60: write one number"),
        ('"1_0"', "write it without quotes"),
        ("0", None),
    ],
)
def test_whole_numbers_that_are_none(minimal: str, problems_of: Problems, text: str, label: str | None) -> None:
    (problem,) = problems_of(minimal.replace("steps: 10", f"steps: {text}"))
    assert (problem.path, problem.label) == ("train.steps", label)


def test_grouped_digits_have_their_fix() -> None:
    with pytest.raises(scalars.Misread) as caught:
        scalars.read_int("10,000")
    assert caught.value.label == "write 10000"


@pytest.mark.parametrize("word", ["no", "off", "on", "yes", "true", "012", "1.0", "1e-6", "2024-01-01", "1:30", ".nan", "0x1F", "=", "1_000"])
def test_text_keeps_its_characters(minimal: str, word: str) -> None:
    recipe = load_text(f"name: {word if word != '.nan' else 'nan'}\n" + minimal + f"track: {{wandb: {{project: {word}}}}}", env={}).recipe
    assert recipe.track.wandb is not None and recipe.track.wandb.project == word
    assert recipe.name == (word if word != ".nan" else "nan")


@pytest.mark.parametrize("label", ["no", "on", "1", "012", "null", "2024-01-01", "1.0"])
def test_labels_keep_their_characters(minimal: str, label: str) -> None:
    text = minimal.replace("default:", f"{label}:").replace("path: train.jsonl", f"path: train.jsonl, label: '{label}'")
    assert list(load_text(text, env={}).recipe.rewards) == [label]


@pytest.mark.parametrize(("text", "value"), [("true", True), ("yes", True), ("on", True), ("No", False), ("OFF", False), ("False", False)])
def test_truth(minimal: str, text: str, value: bool) -> None:
    changed = minimal.replace("org/model", f"org/model, gradient_checkpointing: {text}")
    recipe = load_text(changed + f"rollout: {{ignore_eos: {text}}}", env={}).recipe
    assert recipe.rollout.ignore_eos is value and recipe.models.policy.gradient_checkpointing is value


@pytest.mark.parametrize(
    ("text", "label"), [("1", "write true or false"), ("y", "write true or false"), ('"true"', "write it without quotes"), ("maybe", None)]
)
def test_truth_that_is_none(minimal: str, problems_of: Problems, text: str, label: str | None) -> None:
    (problem,) = problems_of(minimal + f"rollout: {{ignore_eos: {text}}}")
    assert (problem.path, problem.label) == ("rollout.ignore_eos", label)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("1e-6", 1e-6),
        ("1_000", 1000),
        ("true", True),
        ("null", None),
        ('"8"', "8"),
        ('"no"', "no"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("!!str 8", "8"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
        ("nan", "nan"),
        ("{}", {}),
        ("1.5.2", "1.5.2"),
    ],
)
def test_options_are_read_without_a_key_to_go_by(minimal: str, text: str, value: Any) -> None:
    options = load_text(minimal.replace("rule: exact", f"rule: exact, options: {{x: {text}}}"), env={}).recipe.rewards["default"].parts[0].options
    assert options == {"x": value} and type(options["x"]) is type(value)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("no", 'true or false, or the text "no" with quotes?'),
        ("012", "a leading zero means base 8 to some: write 12 or 0o12"),
        (".inf", "the number must be finite"),
        ("1e999", "the number is too large"),
    ],
)
def test_options_that_could_mean_two_things_are_refused(minimal: str, problems_of: Problems, text: str, label: str) -> None:
    (problem,) = problems_of(minimal.replace("rule: exact", f"rule: exact, options: {{x: {text}}}"))
    assert (problem.path, problem.label) == ("rewards.default.parts[0].options.x", label)


def test_duplicate_keys_name_both_lines(minimal: str, problems_of: Problems) -> None:
    (problem,) = problems_of(minimal + "rollout:\n  top_k: 8\n  temperature: 1.0\n  top_k: 4\n")
    assert (problem.code, problem.path, problem.message, problem.label) == (
        "duplicate-key",
        "rollout",
        "duplicate key `top_k`",
        "first written in line 6",
    )
    assert problem.place is not None and (problem.place.line, problem.place.column) == (8, 3)


def test_duplicate_keys_in_quotes_and_at_the_top(minimal: str, problems_of: Problems) -> None:
    assert [item.label for item in problems_of(minimal + '"train": {steps: 20}')] == ["first written in line 4"]


def test_merge_keys_may_be_overridden(minimal: str) -> None:
    text = minimal + "rollout:\n  <<: {temperature: 0.5, top_k: 3}\n  top_k: 4\n"
    rollout = load_text(text, env={}).recipe.rollout
    assert (rollout.temperature, rollout.top_k) == (0.5, 4)
    checkpoint = load_text(minimal + "checkpoint:\n  <<: [{keep: 1}, {keep: 2, every: 5}]\n", env={}).recipe.checkpoint
    assert (checkpoint.keep, checkpoint.every) == (1, 5), "the first of several counts"


def test_a_quoted_merge_key_is_a_key(minimal: str, problems_of: Problems) -> None:
    assert [item.message for item in problems_of(minimal + "rollout: {'<<': {top_k: 1}}")] == ["unknown key `<<`"]
    assert [item.message for item in problems_of(minimal + "rollout: {<<: 3}")] == ["`<<` takes a mapping or a list of mappings"]


def test_anchors_and_aliases(minimal: str, problems_of: Problems) -> None:
    text = minimal.replace("[{rule: exact}]", "&parts [{rule: exact}], other: *parts") + "batch: {epochs: &n 2, updates_per_step: *n}"
    recipe = load_text(text, env={}).recipe
    assert recipe.batch.updates_per_step == 2 and recipe.rewards["other"] == recipe.rewards["default"]
    assert [item.message for item in problems_of(minimal + "seed: *none")] == ["no anchor `&none` above"]
    assert [item.message for item in problems_of(minimal + "seed: &s [*s]")] == ["alias `*s` stands inside its own anchor"]


def test_alias_bombs_are_bounded(problems_of: Problems) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    assert [item.message for item in problems_of("\n".join(lines))] == ["aliases expand to more than 50,000 values"]
    merges = ["m0: &m0 {" + ", ".join(f"k{i}: 1" for i in range(1000)) + "}"] + [f"m{i}: {{<<: *m0}}" for i in range(1, 80)]
    assert [item.message for item in problems_of("\n".join(merges))] == ["merge keys expand to more than 50,000 values"]


def test_deep_nesting_is_bounded(problems_of: Problems) -> None:
    assert problems_of("a: " + "[" * 200 + "]" * 200)[0].message == "nested more than 60 deep"
    assert "nesting" in problems_of("[" * 200_000)[0].message or "nested" in problems_of("[" * 200_000)[0].message
    chain = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [[[[[[[[[*a{i - 1}]]]]]]]]]" for i in range(1, 20)]
    assert problems_of("\n".join(chain))[0].message == "nested more than 60 deep"


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system [echo]", "!!binary aGk=", "!mine x", "!!int '5'", "!!set {a}", "! x", "!!timestamp 2024-01-01"]
)
def test_tags_are_refused(minimal: str, problems_of: Problems, tag: str) -> None:
    (problem,) = (item for item in problems_of(minimal + f"name: {tag}") if item.code == "yaml")
    assert problem.message == f"tag `{tag.split()[0]}` is not allowed" and problem.path == "name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the recipe is empty"),
        ("# only a comment\n", "the recipe is empty"),
        ("---\n", "the recipe is empty"),
        ("null", "the recipe is empty"),
        ("[]", "a recipe is a mapping of keys to values"),
        ("42", "a recipe is a mapping of keys to values"),
        ("just words", "a recipe is a mapping of keys to values"),
        ("a: 1\n---\nb: 2\n", "a second document starts here"),
        ("? [a]\n: b\n", "a key must be plain text"),
        ("'': b\n", "a key is missing in front of `:`"),
        ("a:\n\t- b\n", "a tab in the indentation"),
        ("a: b: c\n", "not YAML: mapping values are not allowed in this context"),
    ],
)
def test_no_recipe_at_all(problems_of: Problems, text: str, message: str) -> None:
    problem = problems_of(text)[0]
    assert problem.message == message and problem.place is not None


def test_what_helps_with_broken_yaml(problems_of: Problems) -> None:
    assert problems_of("a: b: c")[0].hint == "put quotes round a value that holds `: `"
    assert problems_of("a: {b: ${X}}")[0].hint == "put quotes round `${...}` where it stands inside brackets or braces"
    (problem,) = problems_of("a: 1\nb: [1, 2\nc: 3\n")
    assert problem.place is not None and problem.place.line == 3


def test_a_byte_order_mark_and_line_endings(write: Callable[[str, str | bytes], Any], minimal: str) -> None:
    path = write("bom.yaml", b"\xef\xbb\xbf" + minimal.replace("\n", "\r\n").encode() + b"seed: x\r\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert [str(item.place).rpartition("bom.yaml:")[2] for item in caught.value.problems] == ["5:7"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("data", "where", "message"),
    [
        (b"name: caf\xe9\n", "1:10", "not UTF-8 text"),
        ("name: ä".encode() + b"\nname: \xff\n", "2:7", "not UTF-8 text"),
        ("seed: 1\n".encode("utf-16"), "1:1", "not UTF-8 text"),
        (b"seed: 1\nname: a\x00b\n", "2:8", "character U+0000 is not allowed"),
        (b"name: \x1b[2J\n", "1:7", "character U+001B is not allowed"),
    ],
)
def test_bytes_that_are_no_text(write: Callable[[str, str | bytes], Any], data: bytes, where: str, message: str) -> None:
    path = write("bad.yaml", data)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert isinstance(problem, Problem) and problem.message == message and str(problem.place) == f"{path}:{where}"


def test_a_huge_file_is_refused(write: Callable[[str, str | bytes], Any], problems_of: Problems) -> None:
    with pytest.raises(RecipeError, match="is longer than 1,000,000 characters"):
        load_recipe(write("big.yaml", b"#" * (4 * MAX_CHARACTERS + 1)))
    assert problems_of("#" * (MAX_CHARACTERS + 1))[0].message == "longer than 1,000,000 characters"


def test_sections_with_nothing_in_them_take_their_defaults(minimal: str) -> None:
    text = minimal + "rollout:\n#  temperature: 0.5\nalgorithm: {kl: }\n"
    assert load_text(text, env={}).recipe == load_text(minimal, env={}).recipe


@pytest.mark.parametrize(
    ("text", "message", "label"),
    [
        ("rollout: {stop: a}", "must be a list of texts, got `a`", "write `[a]`"),
        ("rollout: {stop: [null]}", "must be text, got null", "put it in quotes if the text is meant"),
        ("rollout: {stop: ['']}", "must not be empty", None),
        ("rollout: {stop_token_ids: [a]}", "must be an integer, got `a`", None),
        ("eval: {pass_k: 1}", "must be a list of integers, got `1`", "write `[1]`"),
        ("rollout: [1]", "must be a mapping, got a list", None),
        ("rollout: 3", "must be a mapping, got `3`", None),
        ("track: {wandb: true}", "must be a mapping or null, got `true`", "`{}` takes the defaults"),
        ("reward_shaping: {overlong: true}", "must be a mapping or null, got `true`", "`{buffer: ...}` switches it on"),
        ("algorithm: {loss: gspo}", "must be a mapping, got `gspo`", "write `{kind: gspo}`"),
        ("algorithm: {loss: gpso}", "must be a mapping, got `gpso`", None),
        ("algorithm: {estimator: rloo}", "unknown key `estimator`", "did you mean `algorithm.advantage.kind`?"),
        ("track: {wandb: {tags: x}}", "must be a list of texts, got `x`", "write `[x]`"),
        ("name: [a]", "must be text or null, got a list", None),
        ("name: a/b", "must be a file name without `/`, got `a/b`", "it names a directory or a file of the run"),
        ('name: "a\\x1b[31m"', "must be a file name without control characters, got `a\x1b[31m`", "it names a directory or a file of the run"),
        ("name: ..", "must be a file name without `/`, got `..`", "it names a directory or a file of the run"),
    ],
)
def test_shapes(minimal: str, problems_of: Problems, text: str, message: str, label: str | None) -> None:
    (problem,) = problems_of(minimal + text)
    assert (problem.message, problem.label) == (message, label)


@pytest.mark.parametrize(
    ("rewards", "label"),
    [
        ("{default: exact}", "write `[{rule: exact}]`"),
        ("{default: [exact]}", "write `{rule: exact}`"),
        ("{default: my_rewards:brevity}", "write `[{python: 'my_rewards:brevity'}]`"),
        ("{default: 5}", None),
        ("exact", "write `{default: [{rule: exact}]}`"),
        ("my_rewards:brevity", "write `{default: [{python: 'my_rewards:brevity'}]}`"),
    ],
)
def test_a_reward_that_is_only_named(minimal: str, problems_of: Problems, rewards: str, label: str | None) -> None:
    (line,) = [line for line in minimal.splitlines() if line.startswith("rewards:")]
    (problem,) = problems_of(minimal.replace(line, f"rewards: {rewards}"))
    assert problem.message.startswith("must be a mapping, got `") and problem.label == label


def test_betas_are_two(minimal: str, problems_of: Problems) -> None:
    (problem,) = problems_of(minimal.replace("{steps: 10}", "{steps: 10, optimizer: {betas: [0.9]}}"))
    assert problem.message == "must be a list of 2 numbers, got 1"


def test_one_part_without_its_list(minimal: str, problems_of: Problems) -> None:
    (problem,) = problems_of(minimal.replace("[{rule: exact}]", "{parts: {rule: exact}}"))
    assert (problem.message, problem.label) == ("must be a list of mappings, got a mapping", "put `- ` in front: a list of mappings")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {temperature: -1}", "must be at least 0, got `-1`"),
        ("rollout: {top_p: 0}", "must be above 0, got `0`"),
        ("rollout: {top_p: 1.01}", "must be at most 1, got `1.01`"),
        ("rollout: {min_p: 1}", "must be below 1, got `1`"),
        ("algorithm: {loss: {clip_low: 1.5}}", "must be at most 1, got `1.5`"),
        ("algorithm: {loss: {dual_clip: 1}}", "must be above 1, got `1`"),
        ("algorithm: {kl: {coefficient: -0.1}}", "must be at least 0, got `-0.1`"),
        ("batch: {micro_batch_size: 0}", "must be at least 1, got `0`"),
        ("checkpoint: {keep: 0}", "must be at least 1, got `0`"),
        ("seed: -1", "must be at least 0, got `-1`"),
        ("seed: 9223372036854775808", "must be at most 9223372036854775807, got `9223372036854775808`"),
        ("reward_shaping: {max_error_rate: 2}", "must be at most 1, got `2`"),
        ("eval: {pass_k: [0]}", "must be at least 1, got `0`"),
    ],
)
def test_ranges(minimal: str, problems_of: Problems, text: str, message: str) -> None:
    (problem,) = problems_of(minimal + text)
    assert problem.message == message
    assert problem.place is not None and problem.place.text[problem.place.column - 1 :].startswith(message.split("`")[1])


def test_required_keys(problems_of: Problems) -> None:
    found = problems_of("seed: 1")
    assert [(item.path, item.message) for item in found if item.code == "missing-key"] == [
        ("models", "`models` is needed"),
        ("data", "`data` is needed"),
        ("rewards", "`rewards` is needed"),
    ]
    assert [item.path for item in found if item.code == "run-length"] == ["train"]
    (problem,) = problems_of("models: {policy: {dtype: auto}}\ndata: {train: {path: x}}\nrewards: {default: [{rule: a}]}\ntrain: {steps: 1}")
    assert (problem.path, problem.message, problem.hint) == ("models.policy.path", "`path` is needed", "`rft explain models.policy.path`")
    assert problem.place is not None and (problem.place.column, problem.place.length) == (10, 6)


def test_places_in_the_tree() -> None:
    problems: list[Problem] = []
    root = compose(Source("t", "a: [1, 'x']\n数: {k: v}\n", "/"), problems)
    assert isinstance(root, Mapping) and not problems
    first, second = root.entries["a"].value, root.entries["数"].value
    assert isinstance(first, Sequence) and (first.place.line, first.place.column, first.place.length) == (1, 4, 8)
    item = first.items[1]
    assert isinstance(item, Scalar) and not item.plain and (item.place.column, item.place.length) == (8, 3)
    assert isinstance(second, Mapping) and (second.place.line, second.place.column) == (2, 4), "columns count characters"
    with pytest.raises(YamlFault):
        compose(Source("t", "a: [", "/"), problems)
