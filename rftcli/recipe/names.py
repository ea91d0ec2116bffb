"""Did you mean: the nearest key or value to one that is not known. First in the same section, then anywhere in the language.

What is left out: names of rules and files, which other rooms know (`closest` serves them too).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rftcli.recipe.kinds import Key, keys, show_pattern
from rftcli.recipe.not_yet import keys_under

NEAR = 0.6
"""Similarity (0..1) from which a name is worth suggesting; difflib's own default."""
SURE = 0.8
"""From here on a similar name beside it is likelier meant than the same name elsewhere."""
TIE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """`text`: what to show behind the caret. `meant`: patterns of the keys that may have been meant."""

    text: str | None = None
    meant: tuple[tuple[str, ...], ...] = ()


def similarity(one: str, other: str) -> float:
    """0..1; letters in another order, and a beginning, count as near: `rl` finds `lr`, `temp` finds `temperature`."""
    from difflib import SequenceMatcher  # only a recipe with a mistake needs it

    one, other = one.lower().replace("-", "_"), other.lower().replace("-", "_")
    if one == other:
        return 1.0
    matcher = SequenceMatcher(None, one, other)
    bound = min(matcher.real_quick_ratio(), matcher.quick_ratio())
    ratio = matcher.ratio() if bound >= NEAR else bound  # far off: the cheap bound says enough
    if len(one) > 1 and sorted(one) == sorted(other):
        return max(ratio, 0.9)
    return max(ratio, 0.85) if len(one) > 2 and other.startswith(one) else ratio


def closest(name: str, known: Collection[str], near: float = NEAR) -> list[str]:
    """The nearest of `known`, several only if they are equally near; empty if none is near."""
    scored = [(similarity(name, item), item) for item in known]
    best = max((score for score, _ in scored), default=0.0)
    return [item for score, item in scored if score > best - TIE] if best >= near else []


def did_you_mean(name: str, known: Collection[str]) -> str | None:
    """
    >>> did_you_mean("wieght", ["weight", "rule"])
    'did you mean `weight`?'
    """
    found = closest(name, known)
    return f"did you mean {either(found)}?" if found else None


HERE: dict[tuple[str, ...], tuple[str, ...]] = {("algorithm", "estimator"): ("algorithm", "advantage", "kind")}
"""An unknown key at its place -> the key that is meant there, where a key of the same name elsewhere means another thing."""


def either(names: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)


def suggest_key(section: tuple[str, ...], name: str, known: Sequence[str]) -> Suggestion:
    """What an unknown key `name` of a section (a pattern) was meant to be. `known`: the keys of that section."""
    if "." in name and (nested := _nested(section, name)) is not None:
        return nested
    if (key := HERE.get((*section, name))) is not None:
        return Suggestion(text=f"did you mean `{show_pattern(key)}`?", meant=(key,))
    beside = closest(name, known)
    if beside and similarity(name, beside[0]) >= SURE:
        return _beside(section, beside)
    if (other := _elsewhere(section, name, [key for key in keys() if key.name == name])) is not None:
        return other
    if (other := _elsewhere(section, name, [key for key in keys() if key.pattern in OTHER_NAMES.get(name, ())])) is not None:
        return other
    if beside:
        return _beside(section, beside)
    listed = closest(name, keys_under(section))
    if listed:
        return Suggestion(text=f"did you mean {either(listed)}, which is not yet supported?")
    similar = closest(name, {key.name for key in keys()}, SURE)
    return _elsewhere(section, name, [key for key in keys() if key.name in similar]) or Suggestion()


def _beside(section: tuple[str, ...], names: Sequence[str]) -> Suggestion:
    return Suggestion(text=f"did you mean {either(names)}?", meant=tuple((*section, name) for name in names))


def _nested(section: tuple[str, ...], name: str) -> Suggestion | None:
    """`rollout.temperature: 1` written as one key."""
    pieces = (*section, *name.split("."))
    if any(key.pieces == pieces for key in keys()):
        return Suggestion(text=f"write it as a section: `{': {'.join(name.split('.'))}: ...{'}' * name.count('.')}`", meant=(pieces,))
    return None


def _elsewhere(section: tuple[str, ...], name: str, found: Sequence[Key]) -> Suggestion | None:
    """The places that share most with where the key stands now, of those the least deep; None if there are too many to help."""

    def shared(key: Key) -> int:
        return next((i for i, (a, b) in enumerate(zip(key.pieces, section, strict=False)) if a != b), min(len(key.pieces), len(section)))

    most = max((shared(key) for key in found), default=0)
    near = [key for key in found if shared(key) == most]
    near = [key for key in near if len(key.pieces) == min(len(other.pieces) for other in near)]
    if not near or len(near) > 3:
        return None
    meant = tuple(key.pieces for key in near)
    if any(key.name != name for key in near):
        shown = [key.name if key.pieces[:-1] == section else key.pattern for key in near]
        return Suggestion(text=f"did you mean {either(shown)}?", meant=meant)
    places = [show_pattern(key.pieces[:-1]) if len(key.pieces) > 1 else "the top level" for key in near]
    return Suggestion(text=f"`{name}` belongs in {' or '.join(places)}", meant=meant)


OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "learning_rate": ("train.optimizer.lr",),
    "lr_scheduler_type": ("train.optimizer.schedule",),
    "max_steps": ("train.steps",),
    "num_epochs": ("train.data_passes",),
    "num_train_epochs": ("train.data_passes",),
    "num_generations": ("rollout.samples_per_prompt",),
    "group_size": ("rollout.samples_per_prompt",),
    "n": ("rollout.samples_per_prompt",),
    "max_completion_length": ("rollout.max_new_tokens",),
    "max_response_length": ("rollout.max_new_tokens",),
    "max_tokens": ("rollout.max_new_tokens",),
    "repetition_penalty": ("rollout.penalties.repetition",),
    "presence_penalty": ("rollout.penalties.presence",),
    "frequency_penalty": ("rollout.penalties.frequency",),
    "bad_words_ids": ("rollout.bad_words",),
    "min_tokens": ("rollout.min_new_tokens",),
    "eos_token_id": ("rollout.stop_token_ids",),
    "guided_regex": ("rollout.structured.regex",),
    "guided_json": ("rollout.structured.json_schema",),
    "max_prompt_length": ("rollout.max_prompt_tokens",),
    "beta": ("algorithm.kl.coefficient",),
    "kl_coef": ("algorithm.kl.coefficient",),
    "epsilon": ("algorithm.loss.clip_low", "algorithm.loss.clip_high"),
    "clip_ratio": ("algorithm.loss.clip_low", "algorithm.loss.clip_high"),
    "train_batch_size": ("batch.prompts_per_step",),
    "gradient_clipping": ("train.max_grad_norm",),
    "model": ("models.policy",),
    "save_steps": ("checkpoint.every",),
    "eval_steps": ("eval.every",),
    "dynamic_sampling": ("rollout.dynamic",),
    "dynamic_filtering": ("rollout.dynamic",),
    "filter_groups": ("rollout.dynamic",),
    "max_num_gen_batches": ("rollout.dynamic.max_extra_rollouts",),
    "use_vllm": ("rollout.engine",),
    "vllm_mode": ("rollout.vllm.process", "rollout.vllm.server"),
    "vllm_server_base_url": ("rollout.vllm.server.urls",),
    "gpu_memory_utilization": ("rollout.vllm.memory_share",),
    "vllm_gpu_memory_utilization": ("rollout.vllm.memory_share",),
    "tensor_parallel_size": ("rollout.vllm.tensor_parallel",),
    "vllm_tensor_parallel_size": ("rollout.vllm.tensor_parallel",),
    "max_num_seqs": ("rollout.vllm.max_sequences",),
    "max_model_len": ("rollout.vllm.max_model_tokens",),
    "enable_sleep_mode": ("rollout.vllm.sleep",),
    "vllm_enable_sleep_mode": ("rollout.vllm.sleep",),
    "enforce_eager": ("rollout.vllm.options",),
    "use_liger_kernel": ("train.kernels",),
    "attn_implementation": ("models.policy.attention",),
    "total_epochs": ("train.data_passes",),
    "total_training_steps": ("train.steps",),
    "gradient_accumulation_steps": ("batch.prompts_per_step", "batch.micro_batch_size"),
    "steps_per_generation": ("batch.updates_per_step",),
    "num_iterations": ("batch.epochs",),
    "ppo_mini_batch_size": ("batch.updates_per_step",),
    "ppo_max_token_len_per_gpu": ("batch.tokens_per_micro_batch",),
    "balance_batch": ("batch.balance",),
    "rollout_batch_size": ("batch.prompts_per_step",),
    "generation_batch_size": ("batch.prompts_per_step",),
    "adv_estimator": ("algorithm.advantage.kind",),
    "scale_rewards": ("algorithm.advantage.normalise_std",),
    "norm_adv_by_std_in_grpo": ("algorithm.advantage.normalise_std",),
    "kl_loss_coef": ("algorithm.kl.coefficient",),
    "init_kl_coef": ("algorithm.kl.coefficient",),
    "loss_type": ("algorithm.loss.kind", "algorithm.loss.aggregate"),
    "loss_agg_mode": ("algorithm.loss.aggregate",),
    "epsilon_high": ("algorithm.loss.clip_high",),
    "clip_ratio_low": ("algorithm.loss.clip_low",),
    "clip_ratio_high": ("algorithm.loss.clip_high",),
    "vllm_importance_sampling_correction": ("algorithm.loss.correction",),
    "mask_truncated_completions": ("reward_shaping.truncated",),
    "grad_clip": ("train.max_grad_norm",),
    "warmup_ratio": ("train.optimizer.warmup_steps",),
    "param_offload": ("train.offload.parameters",),
    "optimizer_offload": ("train.offload.optimizer",),
    "save_freq": ("checkpoint.every",),
    "test_freq": ("eval.every",),
    "report_to": ("track.wandb", "track.tensorboard"),
    "experiment_name": ("name",),
    "model_name_or_path": ("models.policy.path",),
    "bf16": ("models.policy.dtype",),
    "target_modules": ("models.policy.lora.targets",),
    "lora_alpha": ("models.policy.lora.alpha",),
    "tp": ("rollout.vllm.tensor_parallel",),
    "tensor_model_parallel_size": ("rollout.vllm.tensor_parallel",),
    "free_cache_engine": ("rollout.vllm.sleep",),
    "vllm_server_host": ("rollout.vllm.server.urls",),
    "base": ("extends",),
    "_base_": ("extends",),
}
"""Names that other tools use -> ours. How to add one: a line with the patterns of our keys."""
