"""Keys and values that the language has and this version lacks: they are refused as "not yet supported", never as unknown, never ignored.

How to take one out: build it, add it to `sections`, delete its line here. How to add one: a line with what to do instead, as one short sentence.
Patterns are those of `kinds`: `*` stands for a chosen name or an index. What stands below a listed key is covered by it.
"""

from __future__ import annotations

from rftcli.recipe.kinds import show_pattern


def key_reason(pieces: tuple[str, ...]) -> str | None:
    """Why the key with this pattern is not supported yet; None if it is not listed."""
    return _KEYS.get(pieces)


def value_reason(pieces: tuple[str, ...], value: str) -> str | None:
    """Why this value of a supported key is not supported yet; None if it is not listed."""
    return VALUES.get(show_pattern(pieces), {}).get(value)


def keys_under(pieces: tuple[str, ...]) -> list[str]:
    """Names of the listed keys directly in a section."""
    return [key[-1] for key in _KEYS if key[:-1] == pieces]


_SOURCE = {
    "split": "name the file of the split in `path`",
    "columns.images": "only text is trained",
    "columns.videos": "only text is trained",
}
"""The same for training and evaluation sets."""

KEYS: dict[str, str] = {
    "models.policy.revision": "download the revision and give its directory as `path`",
    "models.policy.tokenizer": "the tokenizer of `path` is used",
    "models.policy.quantise": "weights keep their `dtype`",
    "models.policy.freeze": "all parameters are trained",
    "models.policy.lora": "all parameters are trained",
    "models.policy.ema": "only the live weights are kept",
    "models.reference.refresh": "the reference stays as it is",
    "models.reference.offload": "the reference stays on its device",
    "models.critic": "use an estimator without a critic: grpo, rloo, reinforce",
    "models.teacher": "there is no distillation",
    "models.scorers": "use a `python` part that calls the model or service",
    **{f"data.train[].{key}": reason for key, reason in _SOURCE.items()},
    **{f"data.eval.NAME.{key}": reason for key, reason in _SOURCE.items()},
    "data.check_reference": "the rewards of the first step stand in the run's `samples/`: look there",
    "data.images": "only text is trained",
    "data.videos": "only text is trained",
    "rollout.penalties": "sampling is without penalties",
    "rollout.structured": "check the form in a reward part",
    "rollout.by_label": "all labels are sampled alike",
    "rollout.dynamic": "groups without signal are kept and counted",
    "rollout.max_version_lag": "every rollout uses the newest weights",
    "rollout.hf.batch_tokens": "use `batch_rows`",
    "rollout.vllm": "use the engine `hf`",
    "rewards.LABEL.parts[].model": "use a `python` part that calls the model",
    "rewards.LABEL.parts[].clip": "clip inside a `python` part",
    "reward_shaping.overlong": "subtract the penalty in a `python` part",
    "reward_shaping.running_norm": "rewards are used as they are",
    "reward_shaping.clip": "clip inside a `python` part",
    "reward_shaping.truncated": "truncated answers are kept and counted",
    "reward_shaping.missing_eos_penalty": "subtract the penalty in a `python` part",
    "algorithm.advantage.whiten": "advantages are not whitened",
    "algorithm.advantage.clip": "advantages are not clipped",
    "algorithm.advantage.gamma": "rewards are not discounted",
    "algorithm.advantage.lam": "it belongs to gae",
    "algorithm.loss.old": "old log-probs are recomputed when the plan needs them",
    "algorithm.loss.correction": "sampler and trainer are the same model in the engine `hf`",
    "algorithm.loss.entropy_coefficient": "there is no entropy term",
    "algorithm.loss.top_entropy_share": "all tokens are trained",
    "algorithm.kl.controller": "the coefficient is fixed",
    "batch.rollouts_per_update": "every rollout has its own updates",
    "batch.tokens_per_micro_batch": "use `micro_batch_size`",
    "train.max_hours": "stop the run with Ctrl-C or SIGTERM: it writes a checkpoint",
    "train.precision": "master weights, gradients and sums are float32",
    "train.freeze_policy_steps": "the policy is trained from the first step",
    "train.offload": "use a higher `deepspeed.zero_stage`",
    "train.deepspeed.extra": "the plan derives DeepSpeed's configuration",
    "train.compile": "the model runs uncompiled",
    "train.supervised": "there is no supervised stream",
    "eval.rewards": "evaluation uses the rewards of training",
    "eval.vote_k": "use `pass_k`",
    "eval.weights": "the live weights are evaluated",
    "checkpoint.every_minutes": "use `every`, in steps",
    "checkpoint.before_deadline": "use `every`, in steps",
    "checkpoint.keep_best": "the newest are kept: use `keep`",
    "checkpoint.trainer_state": "a checkpoint always holds the trainer's state",
}
"""Pattern of a key -> what holds instead."""

VALUES: dict[str, dict[str, str]] = {
    "models.policy.dtype": {"float16": "float16 needs loss scaling: use bfloat16"},
    "models.policy.attention": dict.fromkeys(("varlen", "flash_2", "flash_3", "flex"), "use sdpa"),
    "rollout.engine": dict.fromkeys(("vllm", "sglang", "diffusers"), "use hf"),
    "rewards.LABEL.combine": dict.fromkeys(("product", "min", "gate", "python"), "use sum, or combine inside one `python` part"),
    "algorithm.advantage.kind": {
        "gae": "it needs a critic: use grpo, rloo or reinforce",
        **dict.fromkeys(
            ("reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gpg", "grpo_passk", "gdpo", "cpgd", "distill"), "use grpo, rloo or reinforce"
        ),
    },
    "algorithm.loss.kind": dict.fromkeys(
        ("rloo_sequence", "gspo", "gmpo", "cispo", "sapo", "cpg", "clip_cov", "kl_cov", "reinforce", "dro"), "use ppo_clip"
    ),
    "algorithm.kl.place": {"reward": "use loss"},
    "profile.tool": dict.fromkeys(("nsys", "memory"), "use torch, or start the whole command under the tool: `nsys profile rft train ...`"),
}
"""Pattern of a key -> value -> what to use instead."""


def _pieces(pattern: str) -> tuple[str, ...]:
    return tuple("*" if piece in ("NAME", "LABEL", "[]") else piece for piece in pattern.replace("[]", ".[]").split("."))


_KEYS = {_pieces(pattern): reason for pattern, reason in KEYS.items()}
