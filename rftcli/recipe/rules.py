"""Rules across keys of a recipe, each with a stable code that `rft explain CODE` knows. They see a `Recipe` and no file.

Those of rewards and data are in `data_rules`. What is left out: single keys (`sections`), and whatever needs the machine, the model or the
rows (`plan`, `data`).

How to add one: a small function that yields a `Finding` for each breach, and a line in RULES at the end. A finding at a key whose value is
not known because of another problem is dropped; name further keys it rests on in `reads`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe import (
    checkpoint_rules,
    data_form_rules,
    data_rules,
    estimator_rules,
    eval_rules,
    kernel_rules,
    launch_rules,
    loss_rules,
    model_rules,
    ppo_rules,
    reward_rules,
    rollout_rules,
    sampling_rules,
    scorer_rules,
    sglang_rules,
    update_rules,
    vllm_rules,
)
from rftcli.recipe.finding import Finding, KnownRules, Rule
from rftcli.recipe.sections import Recipe
from rftcli.recipe.sections.algorithm import GROUP_ESTIMATORS


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


def _k1_in_loss(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    kl = recipe.algorithm.kl
    if kl.coefficient > 0 and kl.estimator == "k1" and kl.place == "loss" and not (kl.unbiased_gradient or kl.ratio_weighted):
        yield Finding(
            path=("algorithm", "kl", "estimator"),
            message="`k1` in the loss has no effect on average",
            reason="its gradient is that of the log-prob alone, with mean 0: use k3 or k2",
            hint="or give it a force with `unbiased_gradient` or `ratio_weighted`",
            reads=(("algorithm", "kl", "coefficient"), ("algorithm", "kl", "place")),
        )


def _token_range(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    low, high = recipe.rollout.min_new_tokens, recipe.rollout.max_new_tokens
    if high != "auto" and low > high:
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
        about=("eval.temperature", "data.eval.NAME.sampling.temperature", "data.eval.NAME.samples_per_prompt"),
        text="Several samples of a prompt need a temperature above 0.",
        check=eval_rules.greedy,
    ),
    "pass-k": Rule(
        about=("eval.pass_k", "data.eval.NAME.samples_per_prompt"), text="pass@k needs an evaluation set with k samples.", check=eval_rules.pass_k
    ),
    "eval-without-data": Rule(about=("eval.every", "data.eval"), text="Regular evaluation needs an evaluation set.", check=eval_rules.without_data),
    "vote-k": Rule(
        about=("eval.vote_k", "data.eval.NAME.samples_per_prompt"), text="maj@k needs an evaluation set with k samples.", check=eval_rules.vote_k
    ),
    "eval-rewards": Rule(about=("eval.rewards",), text="Entries of `eval.rewards` keep the rules of `rewards`.", check=eval_rules.rewards),
    "eval-token-range": Rule(
        about=("data.eval.NAME.sampling.min_new_tokens", "data.eval.NAME.sampling.max_new_tokens"),
        text="`min_new_tokens` of a set is at most its `max_new_tokens`.",
        check=eval_rules.token_range,
    ),
    "early-stop": Rule(
        about=("train.early_stop.metric", "eval.every", "data.eval.NAME.samples_per_prompt"),
        text="A metric that ends a run is one that its evaluations have, and there are evaluations during training.",
        check=eval_rules.early_stop,
    ),
    "name-pattern": Rule(about=("name",), text="A name may hold {date}, {time}, {model}, {recipe} and {seed}.", check=eval_rules.name_pattern),
    "k1-in-loss": Rule(
        about=("algorithm.kl.estimator", "algorithm.kl.place"), text="k1 in the loss exerts no force on average and is refused.", check=_k1_in_loss
    ),
    "no-reward": Rule(
        about=("rewards", "rewards.LABEL.parts"), text="There is at least one reward, and each has a part.", check=data_rules.rewards_empty
    ),
    "zero-weights": Rule(about=("rewards.LABEL.parts[].weight",), text="One weight of a reward is not 0.", check=data_rules.rewards_weightless),
    "part-source": Rule(
        about=("rewards.LABEL.parts[].rule", "rewards.LABEL.parts[].model", "rewards.LABEL.parts[].python"),
        text="A part has exactly one of `rule`, `model` and `python`.",
        check=data_rules.part_source,
    ),
    "part-names": Rule(about=("rewards.LABEL.parts[].name",), text="Parts of a label have different names.", check=data_rules.part_names),
    "unknown-rule": Rule(about=("rewards.LABEL.parts[].rule",), text="A rule is one of the built-in ones.", check=data_rules.known_rule),
    "unknown-option": Rule(about=("rewards.LABEL.parts[].options",), text="A rule takes its own options only.", check=data_rules.known_option),
    "combine": Rule(
        about=("rewards.LABEL.combine", "rewards.LABEL.renormalise", "rewards.LABEL.parts[].weight"),
        text="A gate has something to let pass, and only a sum is renormalised.",
        check=reward_rules.combine,
    ),
    "part-bounds": Rule(
        about=("rewards.LABEL.parts[].clip", "rewards.LABEL.parts[].timeout_seconds"),
        text="A lower bound lies below the upper one; time limits of models are their own.",
        check=reward_rules.part_bounds,
    ),
    "reward-bounds": Rule(about=("reward_shaping.clip",), text="A lower bound lies below the upper one.", check=reward_rules.reward_bounds),
    "truncation": Rule(
        about=("reward_shaping.truncated", "reward_shaping.truncated_factor", "reward_shaping.missing_eos_penalty"),
        text="What is said about truncated answers has an effect, and leaves some answers to learn from.",
        check=reward_rules.truncation,
    ),
    **{code: Rule(about=about, text=text, check=found) for code, (about, text, found) in scorer_rules.ROWS.items()},
    "no-data": Rule(about=("data.train",), text="There is at least one training set.", check=data_rules.data_empty),
    "data-source": Rule(
        about=(
            "data.train[].path",
            "data.train[].python",
            "data.eval.NAME.path",
            "data.eval.NAME.python",
        ),
        text="A data set has exactly one of `path` and `python`.",
        check=data_rules.data_source,
    ),
    "data-meaningless": Rule(
        about=("data.train[].split", "data.train[].options", "data.eval.NAME.split", "data.eval.NAME.options"),
        text="`split` and `options` stand where they mean something: not for a file.",
        check=data_form_rules.meaningless_keys,
    ),
    "data-streaming": Rule(
        about=("data.train[].streaming", "train.steps"), text="A streamed set needs `train.steps`.", check=data_form_rules.streaming
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
    "structured-form": Rule(
        about=("rollout.structured.regex", "rollout.structured.json_schema"),
        text="A structured rollout has exactly one of `regex` and `json_schema`.",
        check=rollout_rules.structured_form,
    ),
    "structured-alone": Rule(
        about=("rollout.structured", "rollout.min_new_tokens", "rollout.ignore_eos", "rollout.bad_words"),
        text="A form decides by itself where a completion ends, and which tokens there are.",
        check=rollout_rules.structured_alone,
    ),
    "bias-keys": Rule(about=("rollout.logit_bias",), text="A key of `logit_bias` is a token id or a text.", check=rollout_rules.bias_keys),
    "batch-limits": Rule(
        about=("rollout.hf.batch_rows", "rollout.hf.batch_tokens"),
        text="`batch_rows` and `batch_tokens` exclude each other.",
        check=rollout_rules.batch_limits,
    ),
    "fake-sampling": Rule(
        about=("rollout.engine",), text="The engine `fake` has no scores that a sampling option could change.", check=rollout_rules.fake_sampling
    ),
    **{code: Rule(about=about, text=text, check=check) for code, (about, text, check) in vllm_rules.ROWS.items()},
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
        check=estimator_rules.std_unused,
    ),
    **{code: Rule(about=about, text=text, check=check) for code, (about, text, check) in estimator_rules.ROWS.items()},
    "micro-batch-twice": Rule(
        about=("batch.micro_batch_size", "batch.tokens_per_micro_batch"),
        text="At most one of `micro_batch_size` and `tokens_per_micro_batch` is a number.",
        check=update_rules.micro_batch_twice,
    ),
    **{code: Rule(about=about, text=text, check=check) for code, (about, text, check) in update_rules.ROWS.items()},
    "rollouts-per-update": Rule(
        about=("batch.rollouts_per_update", "batch.updates_per_step", "batch.prompts_per_step"),
        text="Several rollouts make one update, or one rollout makes several; every rollout has equally many prompts.",
        check=update_rules.rollouts_and_updates,
    ),
    "optimizer-options": Rule(
        about=("train.optimizer.options", "train.optimizer.kind"),
        text="An optimizer takes its own options only, and none that has a key of its own.",
        check=update_rules.optimizer_options,
    ),
    "decay-nothing": Rule(
        about=("train.optimizer.no_decay", "train.optimizer.weight_decay"),
        text="`no_decay` needs a `weight_decay`.",
        check=update_rules.decay_nothing,
    ),
    "whole-matrices": Rule(
        about=("train.optimizer.kind", "train.deepspeed.zero_stage", "train.offload.optimizer"),
        text="Muon needs whole matrices: ZeRO stage 0. Only adamw can be offloaded.",
        check=update_rules.whole_matrices,
    ),
    "offload-stage": Rule(
        about=("train.offload.optimizer", "train.offload.parameters", "train.deepspeed.zero_stage"),
        text="Offloading the optimizer needs ZeRO stage 1 or higher, offloading parameters stage 3.",
        check=update_rules.offload_stage,
    ),
    "precision-pairs": Rule(
        about=("train.precision.master", "train.precision.gradients", "train.offload.optimizer"),
        text="Master weights in bfloat16 go with gradients in bfloat16, and are not offloaded.",
        check=update_rules.precision_pairs,
    ),
    "compile-sharded": Rule(
        about=("train.compile", "train.deepspeed.zero_stage", "train.offload.parameters"),
        text="A model whose parameters are sharded (ZeRO stage 3) is not compiled.",
        check=update_rules.compile_sharded,
    ),
    "deepspeed-extra": Rule(
        about=("train.deepspeed.extra",),
        text="`extra` holds nothing that the plan derives from another key.",
        check=update_rules.deepspeed_extra,
    ),
    "critic": Rule(
        about=("models.critic", "algorithm.advantage.kind"),
        text="gae needs a critic, and a critic needs gae to read its values.",
        check=ppo_rules.critic,
    ),
    "critic-warmup": Rule(
        about=("models.critic.warmup_steps", "models.critic.optimizer.warmup_steps"),
        text="The critic's warm-up is written once, and ends before its schedule does.",
        check=ppo_rules.critic_warmup,
    ),
    "critic-min-lr": Rule(
        about=("models.critic.optimizer.min_lr",), text="`min_lr` is at most `lr`, and needs a schedule that falls.", check=ppo_rules.critic_min_lr
    ),
    "critic-head": Rule(about=("models.critic.head",), text="A named value head is one among the weights of `from`.", check=ppo_rules.critic_head),
    "frozen-policy": Rule(
        about=("train.freeze_policy_steps",),
        text="The policy stands still only while a critic learns, and not for the whole run.",
        check=ppo_rules.frozen_policy,
    ),
    "discount": Rule(
        about=("algorithm.advantage.gamma", "algorithm.advantage.lam"),
        text="`gamma` needs an estimator with rewards per token, `lam` one with a critic.",
        check=ppo_rules.discount,
    ),
    "kl-level": Rule(
        about=("algorithm.kl.level", "algorithm.kl.place"),
        text="`level` is for a KL term in the reward; per token it needs an estimator with rewards per token.",
        check=ppo_rules.kl_level,
    ),
    "kl-controller": Rule(
        about=("algorithm.kl.controller",), text="An adaptive KL coefficient needs a target and a start above 0.", check=ppo_rules.kl_controller
    ),
    **kernel_rules.RULES,
    **loss_rules.RULES,
    "supervised-source": Rule(
        about=("train.supervised.data",),
        text="The supervised stream has exactly one of `path` and `python`, and options only with `python`.",
        check=ppo_rules.supervised_source,
    ),
    "lora-options": Rule(
        about=("models.policy.lora.options",),
        text="LoRA options are those of peft that leave base and reference alone.",
        check=model_rules.lora_options,
    ),
    "lora-targets": Rule(about=("models.policy.lora.targets",), text="An adapter adapts something.", check=model_rules.lora_targets),
    "lora-start": Rule(
        about=("models.policy.lora.start_from",), text="An adapter that is gone on from brings its own shape.", check=model_rules.lora_start
    ),
    "lora-and-freeze": Rule(
        about=("models.policy.freeze", "models.policy.lora"), text="LoRA freezes the model's own weights already.", check=model_rules.lora_and_freeze
    ),
    "quantised": Rule(
        about=("models.policy.quantise", "models.policy.quantise.kind", "models.policy.quantise.nested", "train.deepspeed.zero_stage"),
        text="Quantised weights need LoRA and a ZeRO stage below 3, so their parameters are not offloaded.",
        check=model_rules.quantised,
    ),
    "reference-shard": Rule(
        about=("models.reference.shard", "models.reference.offload", "models.reference.refresh.every"),
        text="A reference that is partitioned stays where it is, and as it is.",
        check=model_rules.reference_shard,
    ),
    "ema": Rule(
        about=("eval.weights", "models.policy.ema", "models.policy.ema.evaluate"),
        text="Evaluating the running mean needs one, and is asked for once.",
        check=model_rules.ema,
    ),
    "revision": Rule(about=("models.policy.revision",), text="Only hub ids have revisions.", check=model_rules.revision),
    "own-arguments": Rule(
        about=("models.policy.options", "models.policy.tokenizer_options"),
        text="What has a key of its own is not an option.",
        check=model_rules.own_arguments,
    ),
    "added-tokens": Rule(about=("models.policy.add_tokens",), text="Added tokens differ from each other.", check=model_rules.added_tokens),
    "best-metric": Rule(
        about=("checkpoint.keep_best.metric", "data.eval"),
        text="The metric that picks the best checkpoints is one of an evaluation set.",
        check=checkpoint_rules.best_metric,
    ),
    "nothing-to-save": Rule(
        about=("checkpoint.trainer_state", "checkpoint.save_hf"),
        text="A checkpoint holds the policy, the trainer's state, or both.",
        check=checkpoint_rules.something_to_save,
    ),
    "launch-environment": Rule(
        about=("launch.env",), text="The environment in a recipe holds no secrets and nothing that a launcher sets.", check=launch_rules.environment
    ),
    **{code: Rule(about=about, text=text, check=check) for code, (about, text, check) in (sampling_rules.ROWS | sglang_rules.ROWS).items()},
    "traced-steps": Rule(
        about=("profile.steps", "train.steps"), text="A step that is traced has to be reached.", check=launch_rules.traced_steps
    ),
}
"""Code -> rule, in the order in which a recipe is read."""
