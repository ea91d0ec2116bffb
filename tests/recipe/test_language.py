"""The whole language of recipes: every key is either supported, with the promised default, or refused as not yet supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from rftcli.recipe.kinds import ANY_KEY, Kind, fields_of, key_table, keys, null_has_a_meaning, pattern_of, show_pattern
from rftcli.recipe.load import load_recipe, load_text
from rftcli.recipe.not_yet import KEYS, VALUES, key_reason
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Problem
from rftcli.recipe.schema import default_of, resolved_yaml

Problems = Callable[..., list[Problem]]

LANGUAGE = r"""
name: null
seed: 0
extends: [presets/dapo, ./base.yaml]
models:
  policy:
    path: org/model
    revision: null
    tokenizer: null
    trust_remote_code: false
    dtype: auto
    attention: auto
    quantise: null
    dropout: 0.0
    freeze: []
    gradient_checkpointing: auto
    options: {}
    lora: {rank: 32, alpha: 64, dropout: 0.0, targets: all-linear, save_also: [], start_from: null}
    ema: {decay: 0.992, evaluate: false, export: false}
    chat: {template: null, options: {}, system: null, prefill: null, score_prefill: true}
  reference: {from: policy, refresh: {every: 0, mix: 0.6}, offload: auto}
  critic: {from: policy, optimizer: {lr: 1.0e-5}, value_clip: 0.2, warmup_steps: 0}
  teacher: null
  scorers:
    helpful: {kind: classifier, path: some/reward-model, head: 0, offload: auto}
    judge: {kind: generative, path: some/judge, prompt: judge.j2, score: {regex: '(.)', scale: 0.1}, cache: true,
            placement: {server: 'http://x', gpus: 2}}
    service: {kind: http, preset: openrlhf, urls: ['http://x'], timeout_seconds: 30, retries: 3, concurrency: 32, headers_env: {}}
data:
  train:
    - {name: gsm8k, path: data/train.jsonl, split: null, weight: 0.7, limit: null, label: math, system: null,
       columns: {prompt: question, reference: answer, images: null, videos: null, label: null, id: null}, extract_reference: '#### (.*)'}
  eval: {gsm8k: {path: data/test.jsonl, label: math, samples_per_prompt: 1}}
  shuffle: true
  overlong_prompt: refuse
  check_reference: warn
  images: {min_pixels: null, max_pixels: null, max_per_prompt: null, unreadable: refuse}
  videos: {fps: 2.0, max_frames: 64, max_pixels: null}
rollout:
  engine: auto
  samples_per_prompt: 8
  max_prompt_tokens: 1024
  max_new_tokens: 1024
  min_new_tokens: 0
  temperature: 1.0
  top_p: 1.0
  top_k: 0
  min_p: 0.0
  stop: []
  stop_token_ids: []
  ignore_eos: false
  penalties: {repetition: 1.0, presence: 0.0, frequency: 0.0}
  structured: null
  by_label: {}
  dynamic: null
  max_version_lag: 0
  hf: {batch_tokens: null}
  vllm: {tensor_parallel: 1, memory_share: auto, process: auto, max_model_tokens: auto, max_sequences: auto, sleep: auto, server: null, options: {}}
rewards:
  math:
    combine: sum
    parts:
      - {rule: math_answer, weight: 0.9, options: {}, on_error: fail_sample}
      - {rule: think_format, weight: 0.1, text: clean}
      - {model: judge, weight: 1.0, clip: [-5.0, 5.0]}
      - {python: my_rewards:brevity, weight: 0.1, name: brevity}
reward_shaping: {overlong: null, running_norm: 'off', clip: null, truncated: keep, missing_eos_penalty: 0.0, max_error_rate: 0.05}
algorithm:
  advantage: {kind: grpo, normalise_std: true, std: group, whiten: with_signal, clip: null, gamma: 1.0, lam: 1.0}
  loss: {kind: ppo_clip, clip_low: 0.2, clip_high: 0.2, dual_clip: null, aggregate: token_mean, old: auto, correction: null,
         entropy_coefficient: 0.0, top_entropy_share: 1.0}
  kl: {coefficient: 0.0, estimator: k3, place: loss, controller: {kind: fixed}}
batch: {prompts_per_step: 64, updates_per_step: 1, epochs: 1, rollouts_per_update: 1, micro_batch_size: auto, tokens_per_micro_batch: auto}
train:
  steps: null
  data_passes: null
  max_hours: null
  max_grad_norm: 1.0
  precision: {master: float32, gradients: float32, reduce: float32}
  optimizer: {kind: adamw, lr: 1.0e-6, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.0, schedule: constant, warmup_steps: 0, min_lr: 0.0,
              schedule_steps: null}
  freeze_policy_steps: 0
  offload: {optimizer: none, parameters: none}
  deepspeed: {zero_stage: auto, extra: {}}
  compile: false
  nonfinite: {skip_at_most: 3}
  supervised: null
eval: {before_training: true, every: 0, at_end: true, rewards: null, temperature: 0.0, max_new_tokens: null, pass_k: [1], vote_k: [], weights: live}
checkpoint: {every: 0, every_minutes: null, before_deadline: false, keep: 3, keep_best: null, trainer_state: true, save_hf: true}
track: {tensorboard: null, wandb: {project: rft, entity: null, group: null, name: null, tags: [], mode: online}}
profile: {steps: [], tool: torch}
"""
"""Every key of the language. Values are defaults, except in the sections of `EXAMPLES`."""
EXAMPLES = ("extends", "models.scorers.NAME.", "models.policy.path", "data.train[].", "data.eval.NAME.", "rewards.LABEL.")
ADDED = {
    "rewards.LABEL.combine.python",
    "rewards.LABEL.combine.options",
    "rewards.LABEL.renormalise",
    "rewards.LABEL.parts[].timeout_seconds",
    "reward_shaping.truncated_factor",
    "reward_shaping.overlong.buffer",
    "reward_shaping.overlong.factor",
    "data.train[].python",
    "data.train[].options",
    "data.eval.NAME.python",
    "data.eval.NAME.options",
    "data.train[].as_chat",
    "data.eval.NAME.as_chat",
    *(f"data.{place}.{key}" for place in ("train[]", "eval.NAME") for key in ("where", "template")),
    "data.train[].streaming",
    "data.seed",
    "batch.layout",
    "batch.share_prompts",
    "batch.balance",
    "models.reference.shard",
    "batch.skip_zero_advantage",
    "rollout.hf.batch_rows",
    "train.deterministic",
    "train.kernels",
    "train.max_tokens",
    "train.optimizer.no_decay",
    "train.optimizer.options",
    "rollout.logit_bias",
    "rollout.bad_words",
    "rollout.structured.regex",
    "rollout.structured.json_schema",
    "rollout.hf.continuous",
    *(f"rollout.vllm.{key}" for key in ("seeds", "lora", "check_weights")),
    "rollout.sglang",
    *(f"rollout.sglang.{key}" for key in (
        "tensor_parallel", "memory_share", "max_model_tokens", "max_sequences", "sleep", "seeds", "check_weights", "options",
    )),
    *(f"rollout.vllm.server.{key}" for key in ("urls", "weights", "folder", "timeout_seconds", "ready_seconds", "retries", "headers_env")),
    *(f"rollout.vllm.server.start{key}" for key in ("", ".servers", ".gpus", ".command")),
    "rollout.hf.options",
    "rollout.hf.options.typical_p",
    "rollout.hf.options.epsilon_cutoff",
    "rollout.hf.options.eta_cutoff",
    "rollout.hf.options.no_repeat_ngram_size",
    "rollout.hf.options.suppress_tokens",
    *(f"data.eval.NAME.sampling{key}" for key in ("", ".temperature", ".top_p", ".top_k", ".min_p", ".max_new_tokens", ".min_new_tokens")),
    *(f"train.early_stop{key}" for key in ("", ".metric", ".patience", ".mode", ".min_delta")),
    *(f"samples{key}" for key in ("", ".every", ".max")),
    "models.policy.router_loss",
    "models.critic.head",
    "models.critic.max_grad_norm",
    *(f"models.critic.optimizer.{key}" for key in (
        "kind", "betas", "eps", "weight_decay", "schedule", "warmup_steps", "min_lr", "schedule_steps", "options", "no_decay",
    )),
    *(f"algorithm.advantage.{key}" for key in (
        "min_std", "passk_std", "baseline", "bootstrap_truncated", "distill_coefficient", "python", "options",
    )),
    *(f"models.teacher.placement{key}" for key in ("", ".gpus", ".memory_share", ".ready_seconds", ".command", ".options")),
    *(f"models.teacher.{key}" for key in (
        "path", "revision", "dtype", "offload", "server", "api", "served_model", "timeout_seconds", "retries", "concurrency", "headers_env",
    )),
    "algorithm.kl.level",
    "algorithm.kl.unbiased_gradient",
    "algorithm.kl.ratio_weighted",
    "algorithm.loss.python",
    "algorithm.loss.options",
    "algorithm.loss.off_policy_mask",
    *(f"algorithm.loss.correction.{key}" for key in (
        "kind", "level", "cap", "band", "gate", "bound", "batch_normalise", "reject", "reject.by", "reject.band", "reject.bound",
    )),
    *(f"algorithm.loss.entropy_controller{key}" for key in ("", ".target", ".delta", ".min", ".max")),
    "algorithm.kl.controller.target",
    "algorithm.kl.controller.horizon",
    "train.supervised.rows_per_update",
    *(f"train.supervised.data.{key}" for key in ("path", "python", "options", "limit", "system", "as_chat")),
    "train.supervised.data",
    "train.supervised.coefficient",
    "train.supervised.data.columns",
    "train.supervised.data.columns.prompt",
    "train.supervised.data.columns.reference",
    "models.policy.tokenizer_options",
    "models.policy.add_tokens",
    "models.policy.lora.options",
    "models.policy.quantise.bits",
    "models.policy.quantise.kind",
    "models.policy.quantise.nested",
    "checkpoint.deadline_margin_seconds",
    "checkpoint.keep_best.metric",
    "checkpoint.keep_best.mode",
    "checkpoint.keep_best.keep",
    "checkpoint.max_gib",
    "checkpoint.background",
    *(f"models.scorers.NAME.{key}" for key in (
        "revision", "tokenizer", "template", "dtype", "trust_remote_code", "quantise", "quantise.bits", "quantise.kind", "quantise.nested", "options",
        "max_tokens", "overlong", "batch_tokens", "shard", "score.json", "score.token", "score.against", "max_new_tokens", "temperature", "samples",
        "api", "engine", "score_field", "batch_size", "per_minute", "python", "memory_gib",
        *(f"placement.{key}" for key in ("tensor_parallel", "memory_share", "ready_seconds", "command", "options")),
    )),
    "launch",
    "launch.env",
    "launch.timeout_minutes",
    "profile.ranks",
    "track.python",
    "track.wandb.upload_samples",
    "rollout.first_token_temperature",
    *(f"rollout.by_label.LABEL.{key}" for key in (
        "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids",
    )),
    *(f"rollout.dynamic.{key}" for key in ("max_extra_rollouts", "range", "metric")),
    *(f"rollout.over_sample{key}" for key in ("", ".factor", ".slice_tokens")),
    *(f"rollout.partial{key}" for key in ("", ".budget_tokens")),
    *(f"rollout.keep{key}" for key in ("", ".best", ".worst")),
    *(f"rollout.replay{key}" for key in ("", ".after_steps", ".times", ".share", ".max_waiting", ".below")),
    *(f"data.curriculum{key}" for key in ("", ".kind", ".range", ".share", ".metric", ".pass_mark", ".memory", ".python", ".options")),
}  # fmt: skip
"""Keys that this package adds to the language."""


def language() -> Iterator[tuple[tuple[str, ...], KeyPath, Any]]:
    """(pattern, path, value) of every key above, down to the keys that are supported or listed."""

    def walk(value: Any, path: KeyPath) -> Iterator[tuple[tuple[str, ...], KeyPath, Any]]:
        pattern = pattern_of(path)
        if path and pattern[-1] != ANY_KEY:
            yield pattern, path, value
            if key_reason(pattern) is not None:
                return
        if isinstance(value, dict):
            for name, item in value.items():
                yield from walk(item, (*path, name))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from walk(item, (*path, index))

    yield from walk(yaml.safe_load(LANGUAGE), ())


def test_every_key_is_supported_or_listed() -> None:
    patterns = {pattern for pattern, _, _ in language()}
    assert len(patterns) > 160
    lost = [show_pattern(pattern) for pattern in patterns if pattern not in key_table() and key_reason(pattern) is None]
    assert lost == []
    both = [show_pattern(pattern) for pattern in patterns if pattern in key_table() and key_reason(pattern) is not None]
    assert both == []


def test_nothing_is_supported_or_listed_beyond_the_language() -> None:
    patterns = {show_pattern(pattern) for pattern, _, _ in language()}
    shared = {pattern.replace("data.train[]", "data.eval.NAME") for pattern in patterns if pattern.startswith("data.train[]")}
    found = {key.pattern for key in keys()}
    scoring = {f"eval.{pattern}" for pattern in found if pattern.startswith("rewards.")}  # `eval.rewards` has the form of `rewards`
    assert scoring <= found
    assert found - patterns - shared - scoring == ADDED
    assert set(KEYS) - patterns - shared == set()


def test_defaults_are_the_promised_ones() -> None:
    compared = 0
    for pattern, path, value in language():
        key = key_table().get(pattern)
        if key is None or key.pattern.startswith(EXAMPLES) or isinstance(value, dict) or key.pattern == "data.train":
            continue
        assert not key.info.is_required(), path
        default = default_of(key.info)
        assert (list(default) if isinstance(default, tuple) else default) == value, format_path(path)
        assert type(default) is not int or type(value) is int
        compared += 1
    assert compared > 70


def test_listed_keys_are_refused_as_not_yet_supported(full: str, problems_of: Problems) -> None:
    for pattern in KEYS:
        path = pattern.replace("[]", "[0]").replace("scorers.NAME", "scorers.judge").replace("NAME", "held_out").replace("LABEL", "math")
        for suffix in ("", ".below"):
            (problem,) = problems_of(full, sets=[f"{path}{suffix}=1"])
            assert (problem.code, problem.path, problem.message) == ("not-yet-supported", path, f"`{path}` is not yet supported")
            assert problem.label == KEYS[pattern]
            assert problem.place is not None and problem.place.text[problem.place.column - 1 :].startswith(path.rpartition(".")[2])


def test_listed_values_are_refused_as_not_yet_supported(full: str, problems_of: Problems) -> None:
    for pattern, values in VALUES.items():
        kind = key_table()[pattern_of(tuple(0 if piece == "[]" else piece for piece in pattern.replace("LABEL", "math").split(".")))].kind
        for value, reason in values.items():
            path = pattern.replace("LABEL", "math")
            assert value not in kind.choices
            (problem,) = problems_of(full, sets=[f"{path}={value}"])
            assert (problem.code, problem.path, problem.message, problem.label) == (
                "not-yet-supported",
                path,
                f"`{value}` is not yet supported",
                reason,
            )
            assert problem.allowed == tuple(str(item) for item in kind.choices)


def test_an_address_without_http(full: str, problems_of: Problems) -> None:
    (problem,) = problems_of(full, sets=["rollout.vllm.server={urls: ['localhost:8000']}"])
    assert problem.path == "rollout.vllm.server.urls[0]"
    assert problem.message == "must be an address that starts with `http://` or `https://`, got `localhost:8000`"


def test_ways_to_combine(full: str, problems_of: Problems) -> None:
    combine = load_text(full, sets=["rewards.math.combine={python: m:f}"], env={}).recipe.rewards["math"].combine
    assert not isinstance(combine, str) and (combine.python, combine.options) == ("m:f", {"scale": 2})
    for value, path, message in (
        ("{python: nonsense}", "rewards.math.combine.python", "must look like `module.path:function`, got `nonsense`"),
        ("summ", "rewards.math.combine", "must be sum, product, min, gate or a mapping, got `summ`"),
        ("[sum]", "rewards.math.combine", "must be sum, product, min, gate or a mapping, got a list"),
    ):
        (problem,) = problems_of(full, sets=[f"rewards.math.combine={value}"])
        assert (problem.path, problem.message) == (path, message)


def test_a_bare_list_takes_back_how_a_parent_combined(write: Callable[[str, str], Any]) -> None:
    text = "models: {policy: {path: org/m}}\ndata: {train: {path: t.jsonl}}\ntrain: {steps: 1}\n"
    write("parent.yaml", text + "rewards: {default: {renormalise: true, parts: [{rule: exact}]}}\n")
    child = write("child.yaml", "extends: parent.yaml\nrewards: {default: [{rule: length}]}\n")
    reward = load_recipe(str(child), env={}).recipe.rewards["default"]
    assert (reward.combine, reward.renormalise, [part.rule for part in reward.parts]) == ("sum", False, ["length"])


def test_a_minimal_recipe_is_enough(minimal: str) -> None:
    recipe = load_text(minimal, env={}).recipe
    assert recipe.models.policy.path == "org/model" and recipe.train.steps == 10
    assert load_text(minimal.replace("steps: 10", "data_passes: 1.5"), env={}).recipe.train.data_passes == 1.5


def test_every_key_says_what_it_means() -> None:
    for key in keys():
        text = key.info.description
        assert text and (text[0].isalpha() or text[0] == "`") and text.endswith(".") and "\n" not in text, key.pattern
        assert key.kind.words()


def test_keys_that_may_be_null_have_null_as_default_or_keep_it() -> None:
    """Null in a child recipe takes a key back to its default, unless it is a value of its own there, which then has to survive merging."""
    meant = {key.pattern for key in keys() if key.kind.null and default_of(key.info) is not None}
    assert meant == {"train.max_grad_norm", "models.critic.value_clip", "models.critic.max_grad_norm"}
    assert {key.pattern for key in keys() if null_has_a_meaning(key.pieces)} == meant


def test_defaults_are_within_their_own_bounds(minimal: str) -> None:
    """Pydantic does not check defaults: write all of them out and read them."""
    loaded = load_text(minimal, env={})
    assert load_text(resolved_yaml(loaded), env={}).recipe == loaded.recipe


def test_recipes_cannot_be_changed_or_coerced(minimal: str) -> None:
    recipe = load_text(minimal, env={}).recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 3
    with pytest.raises(ValueError, match="valid integer"):
        type(recipe.train).model_validate({"steps": "3"})
    with pytest.raises(ValueError, match="Extra inputs"):
        type(recipe.train).model_validate({"stepz": 3})
    with pytest.raises(ValueError, match="finite"):
        type(recipe.rollout).model_validate({"temperature": float("nan")})


@pytest.mark.parametrize(
    ("pattern", "words", "bounds"),
    [
        (("rollout", "top_p"), "a number", ("above 0", "at most 1")),
        (("batch", "micro_batch_size"), "auto or an integer", ("at least 1",)),
        (("models", "policy", "gradient_checkpointing"), "auto or true or false", ()),
        (("train", "deepspeed", "zero_stage"), "auto, 0, 1, 2 or 3", ()),
        (("algorithm", "loss", "dual_clip"), "a number or null", ("above 1",)),
        (("train", "max_grad_norm"), "a number or null", ("above 0",)),
        (("train", "optimizer", "betas"), "a list of 2 numbers", ()),
        (("data", "train"), "a list of mappings", ()),
        (("data", "train", ANY_KEY, "path"), "a path or null", ()),
        (("track", "wandb"), "a mapping or null", ()),
        (("models", "policy", "options"), "a mapping", ()),
    ],
)
def test_kinds_in_words(pattern: tuple[str, ...], words: str, bounds: tuple[str, ...]) -> None:
    kind = key_table()[pattern].kind
    assert (kind.words(), kind.bounds) == (words, bounds)


def test_kinds_of_a_section_keep_its_order() -> None:
    section = key_table()[("models", "reference")].kind.section
    assert section is not None
    assert list(fields_of(section)) == ["from", "refresh", "offload", "shard"]
    assert isinstance(fields_of(section)["from"], Kind)
