"""Rules across keys: each is broken once or more, and each stays silent where it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rftcli.recipe.kinds import keys
from rftcli.recipe.load import load_text
from rftcli.recipe.problems import Problem
from rftcli.recipe.rules import GROUP_ESTIMATORS, RULES, check

Problems = Callable[..., list[Problem]]

KNOWN = {"exact": ("strip", "case"), "near": ()}
EVAL = "data: {train: {path: a}, eval: {e: {path: b, samples_per_prompt: 4}}}"
TWO = "rewards: {default: [{rule: exact}, {rule: exact%s}]}"

BREACHES = [
    ("run-length", ["train=null"], "train", "needs `steps` or `data_passes`"),
    ("run-length", ["train.data_passes=2"], "train.data_passes", "`steps` and `data_passes` both say how long to train"),
    ("group-of-one", ["rollout.samples_per_prompt=1"], "rollout.samples_per_prompt", "must be at least 2 for `grpo`, got 1"),
    (
        "group-of-one",
        ["rollout.samples_per_prompt=1", "algorithm.advantage.kind=rloo"],
        "rollout.samples_per_prompt",
        "must be at least 2 for `rloo`, got 1",
    ),
    ("greedy-training", ["rollout.temperature=0"], "rollout.temperature", "must be above 0 in training, got 0"),
    ("greedy-training", ["rollout.top_k=1"], "rollout.top_k", "must not be 1 in training"),
    (
        "greedy-samples",
        ["data.eval.e={path: b, samples_per_prompt: 4}"],
        "data.eval.e.samples_per_prompt",
        "must be 1 while `eval.temperature` is 0, got 4",
    ),
    (
        "pass-k",
        ["data.eval.e={path: b, samples_per_prompt: 4}", "eval={temperature: 1, pass_k: [1, 4, 8]}"],
        "eval.pass_k[2]",
        "pass@8 needs at least 8 samples per prompt, the evaluation sets have 4",
    ),
    ("eval-without-data", ["eval.every=5"], "eval.every", "is 5, but there is nothing to evaluate"),
    ("k1-in-loss", ["algorithm.kl={coefficient: 0.1, estimator: k1}"], "algorithm.kl.estimator", "`k1` in the loss has no effect on average"),
    ("no-reward", ["rewards.default=null"], "rewards", "has no entry"),
    ("no-reward", ["rewards.default=[]"], "rewards.default.parts", "has no part"),
    ("zero-weights", ["rewards.default=[{rule: exact, weight: 0}, {rule: near, weight: 0.0}]"], "rewards.default.parts", "all weights are 0"),
    ("part-source", ["rewards.default=[{weight: 1}]"], "rewards.default.parts[0]", "needs `rule` or `python`"),
    (
        "part-source",
        ["rewards.default=[{rule: exact, python: 'm:f'}]"],
        "rewards.default.parts[0].python",
        "`rule` and `python` exclude each other",
    ),
    ("part-names", ["rewards.default=[{rule: exact}, {python: 'm:exact'}]"], "rewards.default.parts[1]", "a second part named `exact`"),
    ("part-names", ["rewards.default=[{rule: near, name: exact}, {rule: exact}]"], "rewards.default.parts[1]", "a second part named `exact`"),
    ("unknown-rule", ["rewards.default=[{rule: exct}]"], "rewards.default.parts[0].rule", "unknown rule `exct`"),
    (
        "unknown-option",
        ["rewards.default=[{rule: exact, options: {stripp: true}}]"],
        "rewards.default.parts[0].options.stripp",
        "`exact` has no option `stripp`",
    ),
    ("no-data", ["data.train=[]"], "data.train", "has no set"),
    ("data-source", ["data.train=[{limit: 3}]"], "data.train[0]", "needs `path` or `python`"),
    ("data-source", ["data.eval.e={limit: 3}"], "data.eval.e", "needs `path` or `python`"),
    ("data-source", ["data.train.python='m:f'"], "data.train[0].python", "`path` and `python` exclude each other"),
    ("data-source", ["data.train.options={a: 1}"], "data.train[0].options", "only a `python` source takes options"),
    ("data-names", ["data.train=[{name: x, path: a}, {name: x, path: b}]"], "data.train[1].name", "a second set named `x`"),
    ("data-names", ["data.train=[{path: a}, {name: train, path: b}]"], "data.train[1].name", "a second set named `train`"),
    (
        "reference-pattern",
        ["data.train.extract_reference='(a'"],
        "data.train[0].extract_reference",
        "not a regular expression: missing ), unterminated subpattern at position 0",
    ),
    (
        "reference-pattern",
        ["data.train.extract_reference='####.*'"],
        "data.train[0].extract_reference",
        "needs one group in parentheses, has 0",
    ),
    ("label-without-reward", ["data.train.label=maths"], "data.train[0].label", "no entry `maths` in rewards"),
    (
        "label-without-reward",
        ["rewards={default: null, math: [{rule: exact}]}"],
        "data.train[0]",
        "rows without a label need an entry `default` in rewards",
    ),
    ("token-range", ["rollout={min_new_tokens: 9, max_new_tokens: 8}"], "rollout.min_new_tokens", "must be at most `max_new_tokens`, got 9 above 8"),
    (
        "warmup",
        ["train.optimizer.warmup_steps=11"],
        "train.optimizer.warmup_steps",
        "must be at most `train.steps`, got 11 above 10",
    ),
    (
        "warmup",
        ["train.optimizer={warmup_steps: 6, schedule_steps: 5}"],
        "train.optimizer.warmup_steps",
        "must be at most `train.optimizer.schedule_steps`, got 6 above 5",
    ),
    ("min-lr", ["train.optimizer={min_lr: 1e-4, schedule: linear}"], "train.optimizer.min_lr", "must be at most `lr`, got 0.0001 above 1e-06"),
    ("min-lr", ["train.optimizer.min_lr=1e-7"], "train.optimizer.min_lr", "has no effect on a constant schedule"),
    ("std-unused", ["algorithm.advantage={kind: rloo, std: batch}"], "algorithm.advantage.std", "has no effect with `rloo`"),
    (
        "std-unused",
        ["algorithm.advantage={std: batch, normalise_std: false}"],
        "algorithm.advantage.std",
        "has no effect with `normalise_std: false`",
    ),
    ("launch-environment", ["launch.env={HF_TOKEN: x}"], "launch.env.HF_TOKEN", "`HF_TOKEN` looks like a secret"),
    ("launch-environment", ["launch.env={RANK: '1'}"], "launch.env.RANK", "`RANK` is set by the launcher for each rank"),
    ("traced-steps", ["profile.steps=[2, 11]"], "profile.steps", "step 11 is never reached: `train.steps` is 10"),
]


@pytest.mark.parametrize(("code", "sets", "path", "message"), BREACHES)
def test_breaches(minimal: str, problems_of: Problems, code: str, sets: list[str], path: str, message: str) -> None:
    (problem,) = problems_of(minimal, sets=sets, known_rules=KNOWN)
    assert (problem.code, problem.path, problem.message) == (code, path, message)
    assert problem.place is not None and problem.hint


def test_every_rule_is_broken_above() -> None:
    assert {code for code, _, _, _ in BREACHES} == set(RULES)


@pytest.mark.parametrize(
    "sets",
    [
        ["rollout.samples_per_prompt=1", "algorithm.advantage.kind=reinforce"],
        ["rollout.top_k=2"],
        ["data.eval.e={path: b, samples_per_prompt: 4}", "eval={temperature: 1, pass_k: [4]}"],
        ["data.eval={e: {path: b}, f: {path: c, samples_per_prompt: 4}}", "eval={temperature: 1, pass_k: [4]}"],
        ["eval.every=5", "data.eval.e.path=b"],
        ["algorithm.kl={coefficient: 0, estimator: k1}"],
        ["algorithm.kl={coefficient: 1, estimator: abs}"],
        ["rewards.default=[{rule: exact, weight: 0}, {rule: near}]"],
        ["rewards.default=[{rule: exact, weight: -1}]"],
        ["rewards.default=[{rule: exact}, {rule: exact, name: again}]"],
        ["rewards.default=[{rule: exact, options: {strip: true}}, {python: 'm:f', options: {anything: 1}}]"],
        ["data.train.label=math", "rewards.math=[{rule: exact}]"],
        ["data.train.columns.label=kind", "rewards={default: null, math: [{rule: exact}]}"],
        ["data.train={python: 'a.b:c', path: null, options: {n: 1}}"],
        ["data.train.extract_reference='#### (.*)'"],
        ["rollout={min_new_tokens: 8, max_new_tokens: 8}"],
        ["train.optimizer.warmup_steps=10"],
        ["train={steps: null, data_passes: 0.5, optimizer: {warmup_steps: 1000}}"],
        ["train.optimizer={min_lr: 1e-6, schedule: cosine}"],
        ["algorithm.advantage.std=batch"],
        ["algorithm.advantage={kind: rloo, normalise_std: false}"],
    ],
)
def test_what_is_fine(minimal: str, sets: list[str]) -> None:
    assert load_text(minimal, sets=sets, env={}, known_rules=KNOWN).recipe


def test_without_known_rules_names_are_not_checked(minimal: str) -> None:
    recipe = load_text(minimal, sets=["rewards.default=[{rule: whatever, options: {x: 1}}]"], env={}).recipe
    assert check(recipe) == []
    assert [code for code, _ in check(recipe, KNOWN)] == ["unknown-rule"]


def test_suggestions_of_rules(minimal: str, problems_of: Problems) -> None:
    (problem,) = problems_of(minimal, sets=["rewards.default=[{rule: exct}]"], known_rules=KNOWN)
    assert (problem.label, problem.allowed) == ("did you mean `exact`?", ("exact", "near"))
    (problem,) = problems_of(minimal, sets=["rewards.default=[{rule: exact, options: {stripp: 1}}]"], known_rules=KNOWN)
    assert (problem.label, problem.allowed) == ("did you mean `strip`?", ("case", "strip"))


@pytest.mark.parametrize(
    "change",
    [
        ("rollout: {samples_per_prompt: x}", "rollout.samples_per_prompt"),
        ("rollout: {samples_per_prompt: 1}\nalgorithm: {advantage: {kind: x}}", "algorithm.advantage.kind"),
        ("rollout: {temperature: .nan}", "rollout.temperature"),
        ("eval: {every: 3}\ndatas: {eval: {e: {path: b}}}", ""),
    ],
)
def test_rules_say_nothing_about_values_that_are_not_known(minimal: str, problems_of: Problems, change: tuple[str, str]) -> None:
    text, path = change
    assert [item.path for item in problems_of(minimal + text)] == [path]


def test_all_breaches_at_once_in_the_order_of_the_file(minimal: str, problems_of: Problems) -> None:
    found = problems_of(minimal + "rollout: {temperature: 0, samples_per_prompt: 1, top_p: 2}\neval: {every: 1}\nfoo: 1")
    assert [item.code for item in found] == ["greedy-training", "group-of-one", "wrong-value", "eval-without-data", "unknown-key"]


def test_rules_name_keys_that_exist() -> None:
    patterns = {key.pattern for key in keys()}
    for code, rule in RULES.items():
        assert rule.about and set(rule.about) <= patterns, code
        assert rule.text.endswith(".")
    assert {"grpo", "rloo"} == GROUP_ESTIMATORS
