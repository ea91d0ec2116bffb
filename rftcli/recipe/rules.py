"""Rules across keys of a recipe, each with a stable code that `rft explain CODE` knows. They see a `Recipe` and no file.

Those of rewards and data are in `data_rules`. What is left out: single keys (`sections`), and whatever needs the machine, the model or the
rows (`plan`, `data`).

How to add one: a small function that yields a `Finding` for each breach, and a line in RULES at the end. A finding at a key whose value is
not known because of another problem is dropped; name further keys it rests on in `reads`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rftcli.recipe import data_rules, launch_rules
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.sections import Recipe

GROUP_ESTIMATORS = frozenset({"grpo", "rloo"})
"""Estimators that compare a completion with the others of its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`about`: patterns of the keys it concerns. `text`: the rule in one sentence."""

    about: tuple[str, ...]
    text: str
    check: Callable[[Recipe, KnownRules | None], Iterator[Finding]]


def check(recipe: Recipe, known_rules: KnownRules | None = None) -> list[tuple[str, Finding]]:
    """(code, finding) of every breach. Without `known_rules`, names and options of reward rules are not checked."""
    return [(code, finding) for code, rule in RULES.items() for finding in rule.check(recipe, known_rules)]


def _length(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    train = recipe.train
    both = (("train", "steps"), ("train", "data_passes"))
    if train.steps is None and train.data_passes is None:
        yield Finding(path=("train",), message="needs `steps` or `data_passes`", hint="for example `train: {steps: 100}`", reads=both, at_key=True)
    if train.steps is not None and train.data_passes is not None:
        yield Finding(path=both[1], message="`steps` and `data_passes` both say how long to train", reason="keep one of the two", reads=both)


def _group(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    kind, samples = recipe.algorithm.advantage.kind, recipe.rollout.samples_per_prompt
    if kind in GROUP_ESTIMATORS and samples < 2:
        yield Finding(
            path=("rollout", "samples_per_prompt"),
            message=f"must be at least 2 for `{kind}`, got {samples}",
            reason="a group of one has nothing to be compared with",
            reads=(("algorithm", "advantage", "kind"),),
        )


def _greedy_training(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.rollout.temperature == 0:
        why = "without chance there is nothing to learn from, and log-probs are undefined"
        yield Finding(path=("rollout", "temperature"), message="must be above 0 in training, got 0", reason=why)
    if recipe.rollout.top_k == 1:
        yield Finding(path=("rollout", "top_k"), message="must not be 1 in training", reason="only the likeliest token is left; 0 is off")


def _greedy_eval(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name, source in recipe.data.eval.items():
        if recipe.eval.temperature == 0 and source.samples_per_prompt > 1:
            yield Finding(
                path=("data", "eval", name, "samples_per_prompt"),
                message=f"must be 1 while `eval.temperature` is 0, got {source.samples_per_prompt}",
                reason="greedy samples are all the same",
                hint="set `eval.temperature` above 0",
                reads=(("eval", "temperature"),),
            )


def _pass_k(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    samples = [source.samples_per_prompt for source in recipe.data.eval.values()]
    for index, k in enumerate(recipe.eval.pass_k):
        if samples and k > max(samples):
            yield Finding(
                path=("eval", "pass_k", index),
                message=f"pass@{k} needs at least {k} samples per prompt, the evaluation sets have {max(samples)}",
                reason=f"no set of `data.eval` has `samples_per_prompt: {k}`",
                reads=(("data", "eval"),),
            )


def _eval_without_data(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.eval.every > 0 and not recipe.data.eval:
        yield Finding(
            path=("eval", "every"),
            message=f"is {recipe.eval.every}, but there is nothing to evaluate",
            reason="`data.eval` has no set",
            hint="add a set: `data: {eval: {test: {path: test.jsonl}}}`",
            reads=(("data", "eval"),),
        )


def _k1_in_loss(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    kl = recipe.algorithm.kl
    if kl.coefficient > 0 and kl.estimator == "k1" and kl.place == "loss":
        yield Finding(
            path=("algorithm", "kl", "estimator"),
            message="`k1` in the loss has no effect on average",
            reason="its gradient is that of the log-prob alone, with mean 0: use k3 or k2",
            reads=(("algorithm", "kl", "coefficient"), ("algorithm", "kl", "place")),
        )


def _token_range(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    low, high = recipe.rollout.min_new_tokens, recipe.rollout.max_new_tokens
    if low > high:
        yield Finding(
            path=("rollout", "min_new_tokens"),
            message=f"must be at most `max_new_tokens`, got {low} above {high}",
            reads=(("rollout", "max_new_tokens"),),
        )


def _warmup(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    optimizer = recipe.train.optimizer
    end = optimizer.schedule_steps or recipe.train.steps
    name = "train.optimizer.schedule_steps" if optimizer.schedule_steps else "train.steps"
    if end is not None and optimizer.warmup_steps > end:
        yield Finding(
            path=("train", "optimizer", "warmup_steps"),
            message=f"must be at most `{name}`, got {optimizer.warmup_steps} above {end}",
            reason="the learning rate would never reach its peak",
            reads=(("train", "steps"), ("train", "optimizer", "schedule_steps")),
        )


def _min_lr(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    optimizer = recipe.train.optimizer
    path = ("train", "optimizer", "min_lr")
    if optimizer.min_lr > optimizer.lr:
        message = f"must be at most `lr`, got {optimizer.min_lr:g} above {optimizer.lr:g}"
        yield Finding(path=path, message=message, reads=(("train", "optimizer", "lr"),))
    elif optimizer.min_lr > 0 and optimizer.schedule == "constant":
        reads = (("train", "optimizer", "schedule"),)
        yield Finding(path=path, message="has no effect on a constant schedule", reason="use linear or cosine", reads=reads)


def _std_unused(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    advantage = recipe.algorithm.advantage
    if advantage.std == "batch" and not (advantage.kind == "grpo" and advantage.normalise_std):
        without = f"`{advantage.kind}`" if advantage.kind != "grpo" else "`normalise_std: false`"
        yield Finding(
            path=("algorithm", "advantage", "std"),
            message=f"has no effect with {without}",
            reads=(("algorithm", "advantage", "kind"), ("algorithm", "advantage", "normalise_std")),
        )


RULES: dict[str, Rule] = {
    "run-length": Rule(
        about=("train.steps", "train.data_passes"), text="Exactly one of `steps` and `data_passes` says how long to train.", check=_length
    ),
    "group-of-one": Rule(
        about=("rollout.samples_per_prompt", "algorithm.advantage.kind"),
        text="An estimator that compares within the group needs two samples.",
        check=_group,
    ),
    "greedy-training": Rule(
        about=("rollout.temperature", "rollout.top_k"), text="Training samples: a greedy rollout has nothing to learn from.", check=_greedy_training
    ),
    "greedy-samples": Rule(
        about=("eval.temperature", "data.eval.NAME.samples_per_prompt"),
        text="Several samples of a prompt need a temperature above 0.",
        check=_greedy_eval,
    ),
    "pass-k": Rule(about=("eval.pass_k", "data.eval.NAME.samples_per_prompt"), text="pass@k needs an evaluation set with k samples.", check=_pass_k),
    "eval-without-data": Rule(about=("eval.every", "data.eval"), text="Regular evaluation needs an evaluation set.", check=_eval_without_data),
    "k1-in-loss": Rule(
        about=("algorithm.kl.estimator", "algorithm.kl.place"), text="k1 in the loss exerts no force on average and is refused.", check=_k1_in_loss
    ),
    "no-reward": Rule(
        about=("rewards", "rewards.LABEL.parts"), text="There is at least one reward, and each has a part.", check=data_rules.rewards_empty
    ),
    "zero-weights": Rule(about=("rewards.LABEL.parts[].weight",), text="One weight of a reward is not 0.", check=data_rules.rewards_weightless),
    "part-source": Rule(
        about=("rewards.LABEL.parts[].rule", "rewards.LABEL.parts[].python"),
        text="A part has exactly one of `rule` and `python`.",
        check=data_rules.part_source,
    ),
    "part-names": Rule(about=("rewards.LABEL.parts[].name",), text="Parts of a label have different names.", check=data_rules.part_names),
    "unknown-rule": Rule(about=("rewards.LABEL.parts[].rule",), text="A rule is one of the built-in ones.", check=data_rules.known_rule),
    "unknown-option": Rule(about=("rewards.LABEL.parts[].options",), text="A rule takes its own options only.", check=data_rules.known_option),
    "no-data": Rule(about=("data.train",), text="There is at least one training set.", check=data_rules.data_empty),
    "data-source": Rule(
        about=(
            "data.train[].path",
            "data.train[].python",
            "data.train[].options",
            "data.eval.NAME.path",
            "data.eval.NAME.python",
            "data.eval.NAME.options",
        ),
        text="A data set has exactly one of `path` and `python`, and options only with `python`.",
        check=data_rules.data_source,
    ),
    "data-names": Rule(about=("data.train[].name",), text="Training sets have different names.", check=data_rules.source_names),
    "reference-pattern": Rule(
        about=("data.train[].extract_reference", "data.eval.NAME.extract_reference"),
        text="`extract_reference` is a regular expression with exactly one group.",
        check=data_rules.reference_pattern,
    ),
    "label-without-reward": Rule(
        about=("data.train[].label", "data.eval.NAME.label", "rewards"),
        text="Every label of the data has an entry in rewards.",
        check=data_rules.label_without_reward,
    ),
    "token-range": Rule(
        about=("rollout.min_new_tokens", "rollout.max_new_tokens"), text="`min_new_tokens` is at most `max_new_tokens`.", check=_token_range
    ),
    "warmup": Rule(
        about=("train.optimizer.warmup_steps", "train.steps", "train.optimizer.schedule_steps"),
        text="The warm-up ends before the schedule does.",
        check=_warmup,
    ),
    "min-lr": Rule(
        about=("train.optimizer.min_lr", "train.optimizer.lr", "train.optimizer.schedule"),
        text="`min_lr` is at most `lr`, and needs a schedule that falls.",
        check=_min_lr,
    ),
    "std-unused": Rule(
        about=("algorithm.advantage.std", "algorithm.advantage.normalise_std"),
        text="`std: batch` needs grpo with `normalise_std`.",
        check=_std_unused,
    ),
    "launch-environment": Rule(
        about=("launch.env",), text="The environment in a recipe holds no secrets and nothing that a launcher sets.", check=launch_rules.environment
    ),
    "traced-steps": Rule(
        about=("profile.steps", "train.steps"), text="A step that is traced has to be reached.", check=launch_rules.traced_steps
    ),
}
"""Code -> rule, in the order in which a recipe is read."""
