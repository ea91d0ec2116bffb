"""Rules across keys: each is broken once or more, and each stays silent where it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rftcli.recipe.kinds import keys
from rftcli.recipe.load import load_text
from rftcli.recipe.loss_rules import RULES as LOSS_RULES
from rftcli.recipe.problems import Problem
from rftcli.recipe.rules import RULES, check
from rftcli.recipe.sections.algorithm import GROUP_ESTIMATORS

Problems = Callable[..., list[Problem]]

KNOWN = {"exact": ("strip", "case"), "near": ()}
EVAL = "data: {train: {path: a}, eval: {e: {path: b, samples_per_prompt: 4}}}"
TWO = "rewards: {default: [{rule: exact}, {rule: exact%s}]}"
GAE = ("algorithm.advantage.kind=gae", "models.critic={}")

ALONE = ["rollout.samples_per_prompt=1", "algorithm.advantage.kind=reinforce"]
HTTP = "models.scorers.service={kind: http, urls: ['http://x']}"
JUDGE = "models.scorers.s={kind: generative, path: a/b, prompt: '{{ x }}'"
APART = "models.scorers.s={kind: generative, path: a/b, prompt: '{{ x }}', score: {json: a}, placement: "
PARTIAL = ["rollout={partial: {budget_tokens: 64}, max_version_lag: 2}", "algorithm.loss.old=sampler"]
BREACHES = [
    (
        "part-bounds",
        ["models.scorers.s={kind: http, urls: ['http://x']}", "rewards.default.parts=[{model: s, timeout_seconds: 3}]"],
        "rewards.default.parts[0].timeout_seconds",
        "has no effect with `model`",
    ),
    *(
        (
            "vllm-together", [f"rollout={{engine: vllm, {name}, vllm: {{tensor_parallel: 2}}}}"], f"rollout.{key}",
            "needs `rollout.vllm.tensor_parallel: 1`",
        )
        for key, name in (("by_label", "by_label: {default: {top_p: 0.9}}"), ("over_sample", "over_sample: {}"))
    ),
    ("gdpo-parts", ["algorithm.advantage.kind=gdpo", "reward_shaping.clip=[-1, 1]"], "reward_shaping.clip", "has no effect with `gdpo`"),
    ("gdpo-parts", ["algorithm.advantage.kind=gdpo", "reward_shaping.running_norm=full"], "reward_shaping.running_norm", "has no effect with `gdpo`"),
    (
        "gdpo-parts",
        ["algorithm.advantage.kind=gdpo", "rewards.default={renormalise: true, parts: [{rule: exact}]}"],
        "rewards.default.renormalise",
        "has no effect with `gdpo`",
    ),
    (
        "teacher",
        ["models.teacher.server='http://h:1'", "rollout.first_token_temperature=3.0"],
        "rollout.first_token_temperature",
        "must be 1 with `models.teacher.server`, got 3",
    ),
    (
        "teacher",
        ["models.teacher.server='http://h:1'", "rollout.by_label.default.temperature=0.7"],
        "rollout.by_label.default.temperature",
        "must be 1 with `models.teacher.server`, got 0.7",
    ),
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
    ("part-source", ["rewards.default=[{weight: 1}]"], "rewards.default.parts[0]", "needs `rule`, `model` or `python`"),
    (
        "part-source",
        ["rewards.default=[{rule: exact, python: 'm:f'}]"],
        "rewards.default.parts[0].python",
        "`rule` and `python` exclude each other",
    ),
    ("part-names", ["rewards.default=[{rule: exact}, {python: 'm:exact'}]"], "rewards.default.parts[1]", "a second part named `exact`"),
    (
        "part-names",
        ["rewards.default=[{python: 'm:f'}, {rule: exact, name: f.short}]"],
        "rewards.default.parts[1].name",
        "`f.short` may be a value that part `f` returns by name",
    ),
    ("part-names", ["rewards.default=[{rule: exact, name: penalty}]"], "rewards.default.parts[0].name", "`penalty` is what `reward_shaping` adds"),
    (
        "replayed-share",
        ["rollout.replay={share: 0.1}", "batch.prompts_per_step=8"],
        "rollout.replay.share",
        "0.1 of 8 prompts a step is not one prompt: none would ever come back",
    ),
    ("part-names", ["rewards.default=[{rule: near, name: exact}, {rule: exact}]"], "rewards.default.parts[1]", "a second part named `exact`"),
    ("unknown-scorer", [HTTP, "rewards.default=[{model: servce}]"], "rewards.default.parts[0].model", "no entry `servce` in models.scorers"),
    (
        "unknown-scorer",
        [HTTP, "rewards.default=[{model: service, options: {a: 1}}]"],
        "rewards.default.parts[0].options.a",
        "a `model` part has no options",
    ),
    ("scorer-keys", ["models.scorers.s={kind: classifier}"], "models.scorers.s", "`classifier` needs `path`"),
    ("scorer-keys", [HTTP, "models.scorers.service.head=1"], "models.scorers.service.head", "`head` has no meaning for `http`"),
    (
        "scorer-keys",
        ["models.scorers.s={kind: generative, path: a/b, prompt: '{{ x }}', score: {json: a}, placement: {server: 'http://x'}, offload: true}"],
        "models.scorers.s.offload",
        "`offload` has no meaning for a judge at a server",
    ),
    (
        "judge-placement",
        [f"{JUDGE}, score: {{json: a}}, engine: vllm, options: {{gpu_memory_utilization: 0.2}}}}"],
        "models.scorers.s.options.gpu_memory_utilization",
        "has a key of its own: `models.scorers.s.batch_tokens`",
    ),
    (
        "scorer-keys",
        [f"{JUDGE}, score: {{json: a}}, engine: vllm, overlong: cut_left}}"],
        "models.scorers.s.overlong",
        "`overlong` has no meaning for a judge beside the ranks (`engine: vllm`)",
    ),
    (
        "scorer-keys", [f"{APART}{{gpus: 1}}, engine: vllm}}"], "models.scorers.s.engine",
        "`engine` has no meaning for a judge at a server that the run starts",
    ),
    ("judge-placement", [f"{APART}{{}}}}"], "models.scorers.s.placement", "needs `gpus` or `server`"),
    ("judge-placement", [f"{APART}{{gpus: 1, server: 'http://x'}}}}"], "models.scorers.s.placement.gpus", "`server` and `gpus` exclude each other"),
    *(
        ("judge-placement", [f"{APART}{{server: 'http://x', {key}: {value}}}}}"], f"models.scorers.s.placement.{key}",
         "is for a server that the run starts, with `gpus`")
        for key, value in (("tensor_parallel", 2), ("memory_share", 0.5), ("ready_seconds", 9), ("command", "[vllm]"), ("options", "{a: 1}"))
    ),
    (
        "judge-placement",
        [f"{APART}{{gpus: 3, tensor_parallel: 2}}}}"],
        "models.scorers.s.placement.tensor_parallel",
        "3 GPUs cannot be cut into servers of 2 each",
    ),
    ("judge-placement", [f"{APART}{{gpus: 0, tensor_parallel: 2}}}}"], "models.scorers.s.placement.tensor_parallel", "needs `gpus`"),
    (
        "judge-placement",
        [f"{APART}{{gpus: 1, options: {{max_model_len: 9}}}}}}"],
        "models.scorers.s.placement.options.max_model_len",
        "has a key of its own: `models.scorers.s.max_tokens`",
    ),
    (
        "judge-placement",
        [f"{APART}{{gpus: 1, options: {{gpu-memory-utilization: 0.5}}}}}}"],
        "models.scorers.s.placement.options.gpu-memory-utilization",
        "has a key of its own: `models.scorers.s.placement.memory_share`",
    ),
    (
        "judge-placement",
        [f"{APART}{{gpus: 1, options: {{pipeline_parallel_size: 4}}}}}}"],
        "models.scorers.s.placement.options.pipeline_parallel_size",
        "`pipeline_parallel_size` is not to be chosen",
    ),
    ("judge-placement", [f"{APART}{{gpus: 1, options: {{port: 9}}}}}}"], "models.scorers.s.placement.options.port", "`port` is not to be chosen"),
    (
        "judge-placement",
        [f"{APART}{{gpus: 1}}, api: completions, template: '{{{{ messages }}}}'}}"],
        "models.scorers.s.template",
        "has no effect with `api: completions`",
    ),
    (
        "scorer-keys",
        [f"{APART}{{gpus: 1}}, quantise: {{}}}}"],
        "models.scorers.s.quantise",
        "`quantise` has no meaning for a judge at a server that the run starts",
    ),
    ("scorer-score", [f"{JUDGE}, score: {{scale: 2}}}}"], "models.scorers.s.score", "needs `regex`, `json` or `token`"),
    ("scorer-score", [f"{JUDGE}, score: {{json: a, token: yes}}}}"], "models.scorers.s.score.token", "`json` and `token` exclude each other"),
    ("scorer-score", [f"{JUDGE}, score: {{regex: 'a+'}}}}"], "models.scorers.s.score.regex", "needs one group in parentheses, has 0"),
    ("scorer-score", [f"{JUDGE}, score: {{json: a}}, samples: 3}}"], "models.scorers.s.samples", "needs a temperature above 0"),
    ("scorer-score", [f"{JUDGE}, score: {{json: a, scale: 0}}}}"], "models.scorers.s.score.scale", "must not be 0"),
    ("scorer-score", [f"{JUDGE}, score: {{token: yes, against: [yes]}}}}"], "models.scorers.s.score.against[0]", "`yes` is there twice"),
    (
        "scorer-service",
        ["models.scorers.s={kind: http, urls: [localhost]}"],
        "models.scorers.s.urls[0]",
        "must begin with `http://` or `https://` and a host",
    ),
    (
        "scorer-service",
        [f"{HTTP[:-1]}, headers_env: {{Authorization: Bearer 123}}}}"],
        "models.scorers.service.headers_env.Authorization",
        "is no name of an environment variable",
    ),
    ("scorer-weights", [f"{JUDGE}, score: {{json: a}}, shard: true}}"], "models.scorers.s.shard", "goes with `score.token` alone"),
    (
        "scorer-weights",
        ["models.scorers.s={kind: classifier, path: a/b, options: {torch_dtype: bfloat16}}"],
        "models.scorers.s.options.torch_dtype",
        "has a key of its own: `models.scorers.s.dtype`",
    ),
    (
        "scorer-weights",
        ["models.scorers.s={kind: classifier, path: a/b, quantise: {}, offload: true}"],
        "models.scorers.s.offload",
        "does not go with `quantise`",
    ),
    ("unknown-rule", ["rewards.default=[{rule: exct}]"], "rewards.default.parts[0].rule", "unknown rule `exct`"),
    (
        "unknown-option",
        ["rewards.default=[{rule: exact, options: {stripp: true}}]"],
        "rewards.default.parts[0].options.stripp",
        "`exact` has no option `stripp`",
    ),
    (
        "combine",
        ["rewards.default={combine: min, renormalise: true, parts: [{rule: exact}]}"],
        "rewards.default.renormalise",
        "has no effect with `min`",
    ),
    (
        "combine",
        ["rewards.default={combine: gate, parts: [{rule: exact}, {rule: near, weight: 0}]}"],
        "rewards.default.combine",
        "`gate` needs two parts with a weight",
    ),
    (
        "part-bounds",
        ["rewards.default=[{rule: exact, clip: [1, 1]}]"],
        "rewards.default.parts[0].clip",
        "the lower bound must be below the upper, got [1, 1]",
    ),
    ("reward-bounds", ["reward_shaping.clip=[1, -1]"], "reward_shaping.clip", "the lower bound must be below the upper, got [1, -1]"),
    (
        "truncation",
        ["reward_shaping.truncated_factor=0.5"],
        "reward_shaping.truncated_factor",
        "has no effect with `truncated: keep`",
    ),
    (
        "truncation",
        ["reward_shaping={truncated: mask, missing_eos_penalty: 1}"],
        "reward_shaping.missing_eos_penalty",
        "has no effect with `truncated: mask`",
    ),
    (
        "truncation",
        ["reward_shaping.truncated=mask", "rollout.ignore_eos=true"],
        "reward_shaping.truncated",
        "`mask` would leave every answer out: `rollout.ignore_eos` truncates all of them",
    ),
    ("no-data", ["data.train=[]"], "data.train", "has no set"),
    ("data-source", ["data.train=[{limit: 3}]"], "data.train[0]", "needs `path` or `python`"),
    ("data-source", ["data.eval.e={limit: 3}"], "data.eval.e", "needs `path` or `python`"),
    ("data-source", ["data.train.python='m:f'"], "data.train[0].python", "`path` and `python` exclude each other"),
    ("data-meaningless", ["data.train.options={a: 1}"], "data.train[0].options", "mean nothing for a file"),
    ("data-meaningless", ["data.train.split=test"], "data.train[0].split", "means nothing for a file"),
    ("data-meaningless", ["data.eval.e={python: 'm:f', split: test}"], "data.eval.e.split", "means nothing for a `python` source"),
    ("data-streaming", ["data.train.streaming=true", "train={steps: null, data_passes: 1}"], "data.train[0].streaming", "needs `train.steps`"),
    ("data-names", ["data.train=[{name: x, path: a}, {name: x, path: b}]"], "data.train[1].name", "a second set named `x`"),
    ("data-names", ["data.train=[{path: a}, {name: train, path: b}]"], "data.train[1].name", "a second set named `train`"),
    (
        "data-names",
        ["data.train=[{name: train1, path: a}, {path: b}]"],
        "data.train[0].name",
        "`train1` is what set 2 is called, which has no name of its own",
    ),
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
    (
        "vote-k",
        ["eval={vote_k: [2]}", "data.eval.e={path: b}"],
        "eval.vote_k[0]",
        "maj@2 needs at least 2 samples per prompt, the evaluation sets have 1",
    ),
    (
        "greedy-samples",
        ["data.eval.e={path: b, samples_per_prompt: 2, sampling: {temperature: 0}}", "eval.temperature=1"],
        "data.eval.e.samples_per_prompt",
        "must be 1 while its `sampling.temperature` is 0, got 2",
    ),
    ("eval-rewards", ["eval.rewards.default=[{rule: exactt}]"], "eval.rewards.default.parts[0].rule", "unknown rule `exactt`"),
    ("eval-rewards", ["eval.rewards={}"], "eval.rewards", "has no entry"),
    ("eval-rewards", ["eval.rewards.default=[{rule: exact, weight: 0}]"], "eval.rewards.default.parts", "all weights are 0"),
    (
        "label-without-reward",
        ["eval.rewards.math=[{rule: exact}]", "data.eval.e={path: b, label: maths}"],
        "data.eval.e.label",
        "no entry `maths` in eval.rewards",
    ),
    (
        "eval-token-range",
        ["data.eval.e={path: b, sampling: {min_new_tokens: 9, max_new_tokens: 8}}"],
        "data.eval.e.sampling.min_new_tokens",
        "must be at most `max_new_tokens`, got 9 above 8",
    ),
    (
        "early-stop",
        ["train.early_stop.metric=eval.f.mean@1", "data.eval.e={path: b}", "eval.every=1"],
        "train.early_stop.metric",
        "`eval.f.mean@1` names no evaluation set",
    ),
    (
        "early-stop",
        ["train.early_stop.metric=eval.e.mean@4", "data.eval.e={path: b}", "eval.every=1"],
        "train.early_stop.metric",
        "the set `e` has no metric `mean@4`",
    ),
    (
        "early-stop",
        ["train.early_stop.metric=eval.e.mean@1", "data.eval.e={path: b}"],
        "train.early_stop.metric",
        "needs evaluations during training",
    ),
    ("name-pattern", ["name='{modle}'"], "name", "there is no field `{modle}`"),
    ("name-pattern", ["name='a{date'"], "name", "a brace that is not closed"),
    ("token-range", ["rollout={min_new_tokens: 9, max_new_tokens: 8}"], "rollout.min_new_tokens", "must be at most `max_new_tokens`, got 9 above 8"),
    ("structured-form", ["rollout.structured={}"], "rollout.structured", "needs `regex` or `json_schema`"),
    (
        "structured-form",
        ["rollout.structured={regex: a, json_schema: {type: object}}"],
        "rollout.structured.json_schema",
        "`regex` and `json_schema` exclude each other",
    ),
    ("structured-alone", ["rollout={structured: {regex: a}, min_new_tokens: 1}"], "rollout.min_new_tokens", "must be 0 with `structured`"),
    ("structured-alone", ["rollout={structured: {regex: a}, ignore_eos: true}"], "rollout.ignore_eos", "must be false with `structured`"),
    (
        "structured-alone",
        ["rollout={structured: {regex: a}, bad_words: [b]}"],
        "rollout.bad_words",
        "`bad_words` and `structured` exclude each other",
    ),
    (
        "structured-alone",
        ["rollout={structured: {regex: a}, hf: {options: {suppress_tokens: [1]}}}"],
        "rollout.hf.options.suppress_tokens",
        "`suppress_tokens` and `structured` exclude each other",
    ),
    (
        "structured-alone",
        ["rollout={structured: {regex: a}, hf: {options: {no_repeat_ngram_size: 2}}}"],
        "rollout.hf.options.no_repeat_ngram_size",
        "must be 0 with `structured`",
    ),
    ("bias-keys", ["rollout.logit_bias={'-1': 2}"], "rollout.logit_bias.-1", "`-1` is no token id"),
    (
        "batch-limits",
        ["rollout.hf={batch_rows: 8, batch_tokens: 100}"],
        "rollout.hf.batch_tokens",
        "`batch_rows` and `batch_tokens` exclude each other",
    ),
    ("fake-sampling", ["rollout={engine: fake, penalties: {presence: 1}}"], "rollout.penalties", "has no effect on the engine `fake`"),
    ("fake-sampling", ["rollout={engine: fake, logit_bias: {'3': 1}}"], "rollout.logit_bias", "has no effect on the engine `fake`"),
    ("fake-sampling", ["rollout={engine: fake, bad_words: [a]}"], "rollout.bad_words", "has no effect on the engine `fake`"),
    ("fake-sampling", ["rollout={engine: fake, structured: {regex: a}}"], "rollout.structured", "has no effect on the engine `fake`"),
    (
        "fake-sampling",
        ["rollout={engine: fake, hf: {options: {typical_p: 0.5}}}"],
        "rollout.hf.options",
        "has no effect on the engine `fake`",
    ),
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
    (
        "micro-batch-twice",
        ["batch={micro_batch_size: 4, tokens_per_micro_batch: 4096}"],
        "batch.tokens_per_micro_batch",
        "`micro_batch_size` and `tokens_per_micro_batch` both say how micro-batches are cut",
    ),
    (
        "reference-shard",
        ["models.reference={shard: true, offload: true}"],
        "models.reference.shard",
        "does not go with `offload`",
    ),
    (
        "reference-shard",
        ["models.reference={shard: true, refresh: {every: 5}}"],
        "models.reference.shard",
        "does not go with `refresh`",
    ),
    (
        "skip-zero-advantage",
        ["batch.skip_zero_advantage=true", "algorithm.loss.kind=dro"],
        "batch.skip_zero_advantage",
        "cannot be true here",
    ),
    (
        "balance-by-rows",
        ["batch={micro_batch_size: 4, balance: true}"],
        "batch.balance",
        "goes with micro-batches that are cut by tokens",
    ),
    (
        "rollouts-per-update",
        ["batch={rollouts_per_update: 2, updates_per_step: 2}"],
        "batch.rollouts_per_update",
        "must be 1 with several updates per step, got 2 with `updates_per_step` 2",
    ),
    ("rollouts-per-update", ["batch.rollouts_per_update=3"], "batch.rollouts_per_update", "must divide `prompts_per_step`, got 3 for 64"),
    ("optimizer-options", ["train.optimizer.options={betas: [0.9, 0.9]}"], "train.optimizer.options.betas", "`betas` has a key of its own"),
    ("optimizer-options", ["train.optimizer.options={momentum: 0.9}"], "train.optimizer.options.momentum", "`adamw` has no option `momentum`"),
    ("decay-nothing", ["train.optimizer.no_decay=['*bias']"], "train.optimizer.no_decay", "has no effect while `weight_decay` is 0"),
    (
        "whole-matrices",
        ["train={optimizer: {kind: muon}, deepspeed: {zero_stage: 2}}"],
        "train.deepspeed.zero_stage",
        "must be 0 for `muon`, got 2",
    ),
    (
        "whole-matrices",
        ["train={optimizer: {kind: adamw_8bit}, offload: {optimizer: cpu}}"],
        "train.offload.optimizer",
        "must be none for `adamw_8bit`",
    ),
    (
        "offload-stage",
        ["train={offload: {optimizer: cpu}, deepspeed: {zero_stage: 0}}"],
        "train.offload.optimizer",
        "needs ZeRO stage 1 or higher, got `zero_stage` 0",
    ),
    (
        "offload-stage",
        ["train={offload: {parameters: cpu}, deepspeed: {zero_stage: 2}}"],
        "train.offload.parameters",
        "needs ZeRO stage 3, got `zero_stage` 2",
    ),
    ("precision-pairs", ["train.precision.master=bfloat16"], "train.precision.gradients", "must be bfloat16 while `master` is bfloat16"),
    (
        "precision-pairs",
        ["train={precision: {master: bfloat16, gradients: bfloat16}, offload: {optimizer: cpu}}"],
        "train.precision.master",
        "must be float32 while the optimizer is offloaded",
    ),
    ("compile-sharded", ["train={compile: true, deepspeed: {zero_stage: 3}}"], "train.compile", "must be false under ZeRO stage 3"),
    ("compile-sharded", ["train={compile: true, offload: {parameters: cpu}}"], "train.compile", "must be false under ZeRO stage 3"),
    ("kernels-compiled", ["train={compile: true, kernels: liger}"], "train.kernels", "cannot be liger while `compile` is true"),
    (
        "deepspeed-extra",
        ["train.deepspeed.extra={gradient_clipping: 1.0}"],
        "train.deepspeed.extra.gradient_clipping",
        "the plan derives `gradient_clipping`",
    ),
    (
        "deepspeed-extra",
        ["train.deepspeed.extra={zero_optimization: {overlap_comm: true, stage: 2}}"],
        "train.deepspeed.extra.zero_optimization.stage",
        "the plan derives `zero_optimization.stage`",
    ),
    (
        "deepspeed-extra",
        ["train.deepspeed.extra={zero_optimization: {offload_param: {device: cpu}}}"],
        "train.deepspeed.extra.zero_optimization.offload_param",
        "the plan derives `zero_optimization.offload_param`",
    ),
    ("critic", ["algorithm.advantage.kind=gae"], "algorithm.advantage.kind", "`gae` needs a critic"),
    ("critic", ["models.critic={}"], "models.critic", "nothing reads its values"),
    (
        "critic-warmup",
        [*GAE, "models.critic={warmup_steps: 2, optimizer: {warmup_steps: 3}}"],
        "models.critic.optimizer.warmup_steps",
        "is already `models.critic.warmup_steps`",
    ),
    (
        "critic-warmup",
        [*GAE, "models.critic.warmup_steps=11"],
        "models.critic.warmup_steps",
        "must be at most 10, the steps of its schedule, got 11",
    ),
    (
        "critic-min-lr",
        [*GAE, "models.critic.optimizer={min_lr: 1e-4, schedule: linear}"],
        "models.critic.optimizer.min_lr",
        "must be at most `lr`, got 0.0001 above 1e-05",
    ),
    ("critic-min-lr", [*GAE, "models.critic.optimizer.min_lr=1e-7"], "models.critic.optimizer.min_lr", "has no effect on a constant schedule"),
    ("critic-head", [*GAE, "models.critic.head=v_head"], "models.critic.head", "the policy has no value head"),
    ("frozen-policy", ["train.freeze_policy_steps=2"], "train.freeze_policy_steps", "needs a critic"),
    ("frozen-policy", [*GAE, "train.freeze_policy_steps=10"], "train.freeze_policy_steps", "must be below `train.steps`, got 10 of 10"),
    ("discount", ["algorithm.advantage.gamma=0.9"], "algorithm.advantage.gamma", "has no effect with `grpo`"),
    ("discount", ["algorithm.advantage={kind: reinforce, lam: 0.9}"], "algorithm.advantage.lam", "has no effect with `reinforce`"),
    ("kl-level", ["algorithm.kl.level=sequence"], "algorithm.kl.level", "has no effect with `place: loss`"),
    ("kl-level", ["algorithm.kl={place: reward, level: token}"], "algorithm.kl.level", "must be sequence or mean for `grpo`"),
    (
        "kl-controller",
        ["algorithm.kl={coefficient: 0.1, controller: {kind: adaptive}}"],
        "algorithm.kl.controller.kind",
        "needs a `target`",
    ),
    (
        "kl-controller",
        ["algorithm.kl.controller={kind: adaptive, target: 1}"],
        "algorithm.kl.controller.kind",
        "needs a `coefficient` above 0 to start from",
    ),
    ("kl-controller", ["algorithm.kl.controller.target=1"], "algorithm.kl.controller.target", "has no effect with `kind: fixed`"),
    ("supervised-source", ["train.supervised={data: {limit: 3}}"], "train.supervised.data", "needs `path` or `python`"),
    (
        "supervised-source",
        ["train.supervised={data: {path: a.jsonl, python: 'm:f'}}"],
        "train.supervised.data.python",
        "`path` and `python` exclude each other",
    ),
    (
        "supervised-source",
        ["train.supervised={data: {path: a.jsonl, options: {a: 1}}}"],
        "train.supervised.data.options",
        "only a `python` source takes options",
    ),
    (
        "deepspeed-extra",
        ["train.deepspeed.extra={overlap_comm: true}"],
        "train.deepspeed.extra.overlap_comm",
        "`overlap_comm` is not passed on to DeepSpeed",
    ),
    ("lora-options", ["models.policy.lora.options={r: 4}"], "models.policy.lora.options.r", "`r` is `models.policy.lora.rank` here"),
    ("lora-options", ["models.policy.lora.options={use_dorra: true}"], "models.policy.lora.options.use_dorra", "LoRA has no option `use_dorra` here"),
    (
        "lora-options",
        ["models.policy.lora.options={init_lora_weights: pissa}"],
        "models.policy.lora.options.init_lora_weights",
        "must be true, gaussian or orthogonal, got pissa",
    ),
    (
        "lora-options",
        ["models.policy.lora.options={use_dora: true}", "models.policy.quantise={}"],
        "models.policy.lora.options.use_dora",
        "has no exact merged form over quantised weights",
    ),
    ("lora-targets", ["models.policy.lora.targets=[]"], "models.policy.lora.targets", "names no module"),
    ("lora-start", ["models.policy.lora={start_from: org/a, rank: 4}"], "models.policy.lora.rank", "has no effect with `start_from`"),
    (
        "lora-and-freeze",
        ["models.policy.lora={}", "models.policy.freeze=['*']"],
        "models.policy.freeze",
        "has no effect with LoRA, which freezes all of the model's own weights",
    ),
    ("quantised", ["models.policy.quantise={}"], "models.policy.quantise", "needs `models.policy.lora`"),
    (
        "quantised",
        ["models.policy={lora: {}, quantise: {}}", "train.deepspeed.zero_stage=3"],
        "models.policy.quantise",
        "does not go with `train.deepspeed.zero_stage: 3`",
    ),
    (
        "quantised",
        ["models.policy={path: m.gguf, lora: {}, quantise: {}}"],
        "models.policy.quantise",
        "does not go with a GGUF file, whose blocks are unpacked",
    ),
    ("quantised", ["models.policy={lora: {}, quantise: {bits: 8, kind: nf4}}"], "models.policy.quantise.kind", "has no effect with 8 bits"),
    ("ema", ["eval.weights=ema"], "eval.weights", "`ema` needs `models.policy.ema`"),
    (
        "ema",
        ["eval.weights=ema", "models.policy.ema.evaluate=true"],
        "models.policy.ema.evaluate",
        "evaluates the mean a second time: `eval.weights` is ema",
    ),
    ("revision", ["models.policy={path: 'builtin:quickstart', revision: v1}"], "models.policy.revision", "does not apply to builtin:quickstart"),
    (
        "own-arguments",
        ["models.policy.tokenizer_options={revision: v1}"],
        "models.policy.tokenizer_options.revision",
        "has a key of its own: `models.policy.revision`",
    ),
    ("added-tokens", ["models.policy.add_tokens=[a, b, a]"], "models.policy.add_tokens[2]", "`a` is listed twice"),
    ("best-metric", ["checkpoint.keep_best.metric=eval.a.mean@1"], "checkpoint.keep_best.metric", "needs an evaluation set"),
    (
        "own-arguments",
        ["models.policy.tokenizer_options={use_fast: false}"],
        "models.policy.tokenizer_options.use_fast",
        "would have no effect",
    ),
    ("added-tokens", ["models.policy.add_tokens=[a, b, a]"], "models.policy.add_tokens[2]", "`a` is listed twice"),
    ("best-metric", ["checkpoint.keep_best.metric=eval.a.mean@1"], "checkpoint.keep_best.metric", "needs an evaluation set"),
    (
        "best-metric",
        ["data.eval.e={path: b}", "checkpoint.keep_best.metric=eval.f.mean@1"],
        "checkpoint.keep_best.metric",
        "`eval.f.mean@1` is no metric of an evaluation set",
    ),
    (
        "nothing-to-save",
        ["checkpoint={trainer_state: false, save_hf: false}"],
        "checkpoint.trainer_state",
        "and `save_hf` are both false: a checkpoint would hold no weights",
    ),
    ("launch-environment", ["launch.env={HF_TOKEN: x}"], "launch.env.HF_TOKEN", "`HF_TOKEN` looks like a secret"),
    ("launch-environment", ["launch.env={RANK: '1'}"], "launch.env.RANK", "`RANK` is set by the launcher for each rank"),
    (
        "vllm-arguments",
        ["rollout.vllm.options={gpu_memory_utilization: 0.5}"],
        "rollout.vllm.options.gpu_memory_utilization",
        "has a key of its own: `rollout.vllm.memory_share`",
    ),
    (
        "vllm-arguments",
        ["rollout.vllm.options={max-num-seqs: 5}"],
        "rollout.vllm.options.max-num-seqs",
        "has a key of its own: `rollout.vllm.max_sequences`",
    ),
    ("vllm-arguments", ["rollout.vllm.options={load_format: auto}"], "rollout.vllm.options.load_format", "`load_format` is not to be chosen"),
    ("vllm-check", ["rollout.vllm={check_weights: true, tensor_parallel: 2}"], "rollout.vllm.check_weights", "needs `tensor_parallel: 1`"),
    (
        "vllm-check",
        ["rollout.vllm={check_weights: true, options: {quantization: fp8}}"],
        "rollout.vllm.check_weights",
        "does not go with a quantised engine",
    ),
    ("vllm-servers", ["rollout.vllm.server={}"], "rollout.vllm.server", "needs `urls` or `start`"),
    ("vllm-servers", ["rollout.vllm.server={urls: ['http://a:1'], start: {}}"], "rollout.vllm.server", "`urls` and `start` exclude each other"),
    ("vllm-servers", ["rollout.vllm.server.urls=['http://a:1', 'http://a:1/']"], "rollout.vllm.server.urls", "names http://a:1/ twice"),
    (
        "vllm-servers",
        ["rollout.vllm.server={urls: ['http://a:1'], weights: nccl, folder: /w}"],
        "rollout.vllm.server.folder",
        "is for `weights: files`",
    ),
    ("vllm-server-gpus", ["rollout.vllm.server.start={gpus: [1, 1], servers: 2}"], "rollout.vllm.server.start.gpus", "names a GPU twice"),
    (
        "vllm-server-gpus",
        ["rollout.vllm={tensor_parallel: 2, server: {start: {gpus: [4, 5, 6], servers: 2}}}"],
        "rollout.vllm.server.start.gpus",
        "names 3 GPUs, 2 servers of 2 GPUs each need 4",
    ),
    *(
        ("server-addresses", [f"{key}={before}'{url}'{after}"], path, text)
        for key, before, after, path in (
            ("rollout.vllm.server", "{urls: [", "]}", "rollout.vllm.server.urls[0]"), ("models.teacher.server", "", "", "models.teacher.server"),
        )
        for url, text in (
            ("http://host:99999", "is no address: a port is a number up to 65535"),
            ("http://host:eighty", "is no address: a port is a number up to 65535"),
            ("http://[::1", "is no address: an IPv6 host stands in a pair of brackets"),
            ("http://:8000", "is no address: it has no host"),
            ("http://a b:1", "is no address: there is a blank in it"),
            ("http://host:1?key=x", "must end with host, port or path: paths of requests are put behind it"),
        )
    ),
    ("vllm-servers", ["rollout.vllm.server.urls=['http://a:1', 'http://a:1/v1']"], "rollout.vllm.server.urls", "names http://a:1/v1 twice"),
    (
        "vllm-server-gpus",
        ["rollout.vllm.server.start={gpus: [6, 7], servers: 1}"],
        "rollout.vllm.server.start.gpus",
        "names 2 GPUs, 1 server of 1 GPU needs 1",
    ),
    ("vllm-apart", ["rollout.vllm={process: beside, seeds: engine}"], "rollout.vllm.seeds", "`engine` needs an engine inside the rank"),
    ("vllm-apart", ["rollout.vllm={process: beside, options: {port: 1}}"], "rollout.vllm.options.port", "`port` is not to be chosen"),
    *(
        ("vllm-apart", [f"rollout.vllm={{{key}: {value}, server: {{start: {{}}}}}}"], f"rollout.vllm.{key}", "excludes `server`")
        for key, value in (("process", "beside"), ("process", "inside"), ("sleep", "1"))
    ),
    *(
        (
            "vllm-apart", [f"rollout.vllm={{{key}: {value}, server: {{urls: ['http://a:1']}}}}"], f"rollout.vllm.{key}",
            "is for engines that the run starts",
        )
        for key, value in (("memory_share", "0.5"), ("options", "{block_size: 32}"), ("tensor_parallel", "2"))
    ),
    (
        "vllm-sampling",
        ["rollout={vllm: {server: {urls: ['http://h:1']}}, hf: {options: {typical_p: 0.9}}}"],
        "rollout.hf.options",
        "are options of the engine `hf`",
    ),
    (
        "first-token",  # where nothing is said of the engine, a server makes it vllm
        ["rollout={vllm: {server: {urls: ['http://h:1']}}, first_token_temperature: 3.0}"],
        "rollout.first_token_temperature",
        "needs the engine `hf`, not `vllm`",
    ),
    ("vllm-sampling", ["rollout={engine: vllm, hf: {options: {typical_p: 0.9}}}"], "rollout.hf.options", "are options of the engine `hf`"),
    ("vllm-arguments", ["rollout.vllm.options={enable_lora: true}"], "rollout.vllm.options.enable_lora", "has a key of its own: `rollout.vllm.lora`"),
    ("vllm-lora", ["rollout={engine: vllm, vllm: {lora: adapter}}"], "rollout.vllm.lora", "needs `models.policy.lora`"),
    ("vllm-lora", ["rollout={vllm: {lora: adapter}}"], "rollout.vllm.lora", "needs `models.policy.lora`"),  # on a GPU auto is vllm
    (
        "vllm-lora",
        ["rollout={vllm: {lora: adapter}}", "models.policy.lora={options: {use_dora: true}}"],
        "models.policy.lora.options.use_dora",
        "`use_dora` does not go with `rollout.vllm.lora: adapter`",
    ),
    *(
        (
            "vllm-lora",
            ["models.policy.lora={}", f"rollout={{engine: {engine}, vllm: {{lora: adapter, {place}}}}}"],
            "rollout.vllm.lora",
            "`adapter` needs an engine inside the ranks",
        )
        for engine, place in (("vllm", "process: beside"), ("vllm", "server: {urls: ['http://a:1']}"), ("auto", "server: {start: {}}"))
    ),
    *(
        ("vllm-lora", ["rollout={engine: vllm, vllm: {lora: adapter}}", f"models.policy.lora={{{lora}}}"], f"models.policy.lora.{path}", message)
        for lora, path, message in (
            ("save_also: [lm_head]", "save_also", "does not go with `rollout.vllm.lora: adapter`"),
            ("start_from: ./a", "start_from", "does not go with `rollout.vllm.lora: adapter`"),
            ("rank: 1024", "rank", "is at most 512 for an adapter in vLLM, got 1024"),
            ("targets: [q_proj, lm_head]", "targets[1]", "`lm_head` cannot be adapted in vLLM"),
            ("options: {use_dora: true}", "options.use_dora", "`use_dora` does not go with `rollout.vllm.lora: adapter`"),
            ("options: {lora_bias: true}", "options.lora_bias", "`lora_bias` does not go with `rollout.vllm.lora: adapter`"),
        )
    ),
    (
        "sglang-arguments",
        ["rollout.sglang.options={mem_fraction_static: 0.5}"],
        "rollout.sglang.options.mem_fraction_static",
        "has a key of its own: `rollout.sglang.memory_share`",
    ),
    ("sglang-arguments", ["rollout.sglang.options={dp_size: 2}"], "rollout.sglang.options.dp_size", "`dp_size` is not to be chosen"),
    ("sglang-check", ["rollout.sglang={check_weights: true, tensor_parallel: 2}"], "rollout.sglang.check_weights", "needs `tensor_parallel: 1`"),
    ("sglang-sampling", ["rollout={engine: sglang, hf: {options: {typical_p: 0.9}}}"], "rollout.hf.options", "are options of the engine `hf`"),
    *(
        ("sglang-sampling", [f"rollout={{engine: sglang, {key}}}"], f"rollout.{path}", message)
        for key, path, message in (
            ("bad_words: [a]", "bad_words", "is not sampled by the engine `sglang`"),
            ("penalties: {repetition: 1.1}", "penalties.repetition", "must be 1.0 for the engine `sglang`"),
            ("penalties: {presence: -3}", "penalties.presence", "must be within -2 and 2 for the engine `sglang`"),
            ("penalties: {frequency: 2.5}", "penalties.frequency", "must be within -2 and 2 for the engine `sglang`"),
            ("ignore_eos: true, stop_token_ids: [3]", "ignore_eos", "must be false with `stop_token_ids` for the engine `sglang`"),
            (
                "ignore_eos: true, by_label: {default: {stop_token_ids: [3]}}", "ignore_eos",
                "must be false with `stop_token_ids` for the engine `sglang`",
            ),
            ("stop: [a], min_new_tokens: 3", "stop", "does not go with `min_new_tokens` for the engine `sglang`"),
            (
                "stop: [a], by_label: {default: {min_new_tokens: 3}}", "by_label.default.stop",
                "does not go with `min_new_tokens` for the engine `sglang`",
            ),
            (f"stop: [{', '.join(f'a{number}' for number in range(33))}]", "stop", "is at most 32 strings for the engine `sglang`, got 33"),
        )
    ),
    (
        "sglang-sampling",
        ["rollout={engine: sglang, stop: [a]}", "data.eval.e={path: b, sampling: {min_new_tokens: 2}}"],
        "rollout.stop",
        "does not go with `min_new_tokens` for the engine `sglang`",
    ),
    *(
        (
            "sglang-together", [f"rollout={{engine: sglang, {name}, sglang: {{tensor_parallel: 2}}}}"], f"rollout.{key}",
            "needs `rollout.sglang.tensor_parallel: 1`",
        )
        for key, name in (("by_label", "by_label: {default: {top_p: 0.9}}"), ("over_sample", "over_sample: {}"))
    ),
    (
        "sglang-together",
        [*PARTIAL, "rollout={engine: sglang, sglang: {tensor_parallel: 2}}"],
        "rollout.partial",
        "needs `rollout.sglang.tensor_parallel: 1`",
    ),
    ("traced-steps", ["profile.steps=[2, 11]"], "profile.steps", "step 11 is never reached: `train.steps` is 10"),
    *(
        ("spread-of-one", [*ALONE, f"rollout.{key}={value}"], f"rollout.{key}", "needs `samples_per_prompt` of at least 2")
        for key, value in (("dynamic", "{}"), ("replay", "{}"), ("keep", "{best: 1, worst: 0}"))
    ),
    ("sampling-metric", ["rollout.dynamic.metric=exakt"], "rollout.dynamic.metric", "`rewards.default` has no part `exakt`"),
    ("sampling-metric", ["data.curriculum.metric=x"], "data.curriculum.metric", "`rewards.default` has no part `x`"),
    ("sampling-range", ["rollout.dynamic.range=[0.9, 0.1]"], "rollout.dynamic.range", "the first number is the lower bound, got 0.9 and 0.1"),
    ("sampling-range", ["data.curriculum.range=[0.1, 1.5]"], "data.curriculum.range", "a pass rate lies between 0 and 1"),
    (
        "refill-in-one-rollout",
        ["rollout.dynamic={}", "batch.rollouts_per_update=2"],
        "batch.rollouts_per_update",
        "must be 1 with `rollout.dynamic`",
    ),
    ("over-sampling", ["rollout={over_sample: {}, dynamic: {}}"], "rollout.over_sample", "does not go together with `rollout.dynamic`"),
    (
        "over-sampling",
        ["rollout.over_sample={}", "batch.rollouts_per_update=2"],
        "rollout.over_sample",
        "needs `batch.rollouts_per_update` of 1",
    ),
    (
        "over-sampling",
        ["rollout.over_sample.slice_tokens=1024"],
        "rollout.over_sample.slice_tokens",
        "must be below `rollout.max_new_tokens`, got 1024 of 1024",
    ),
    *(("partial-ends", sets, where, text) for sets, where, text in (
        (
            ["rollout={partial: {}, max_version_lag: 2}", "algorithm.loss.old=sampler"],
            "rollout.partial",
            "needs `budget_tokens` or `rollout.over_sample`",
        ),
        (
            [*PARTIAL, "rollout.partial.budget_tokens=1024"],
            "rollout.partial.budget_tokens",
            "must be below `rollout.max_new_tokens`, got 1024 of 1024",
        ),
        (
            [*PARTIAL, "rollout.partial.budget_tokens=64", "rollout.over_sample.slice_tokens=65"],
            "rollout.over_sample.slice_tokens",
            "must be at most `rollout.partial.budget_tokens`, got 65 of 64",
        ),
    )),
    (
        "vllm-together",
        [*PARTIAL, "rollout={engine: vllm, vllm: {tensor_parallel: 2}}"],
        "rollout.partial",
        "needs `rollout.vllm.tensor_parallel: 1`",
    ),
    ("partial-pool", [*PARTIAL, "batch.rollouts_per_update=2"], "rollout.partial", "needs `batch.rollouts_per_update` of 1"),
    (
        "partial-pool",
        [*PARTIAL, "data.train={path: t.jsonl, streaming: true}"],
        "rollout.partial",
        "does not go together with a streamed training set",
    ),
    ("version-lag", ["rollout.max_version_lag=1"], "rollout.max_version_lag", "has no effect without `rollout.partial`"),
    (
        "version-lag",
        [*PARTIAL, "batch={updates_per_step: 2, epochs: 2}"],
        "rollout.partial",
        "needs a `rollout.max_version_lag` of at least 4, got 2",
    ),
    (
        "version-lag",
        [*PARTIAL, "rollout.over_sample={factor: 3.5, slice_tokens: 64}"],
        "rollout.over_sample.factor",
        "3.5 needs a `rollout.max_version_lag` of at least 3, got 2",
    ),
    ("partial-tokens", [*PARTIAL, "algorithm.loss.old=auto"], "rollout.partial", "needs `algorithm.loss.old: sampler`"),
    (
        "partial-tokens",
        [*PARTIAL, "algorithm.loss={old: auto, correction: {kind: reject, reject: {by: k2, bound: 1}}}"],
        "algorithm.loss.correction.kind",
        "must be truncate or mask with `rollout.partial`, got reject",
    ),
    (
        "partial-tokens",
        [*PARTIAL, "algorithm.loss={kind: reinforce, old: sampler}"],
        "algorithm.loss.kind",
        "`reinforce` needs `importance_weight` with `rollout.partial`",
    ),
    ("kept-samples", ["rollout.keep={best: 0, worst: 0}"], "rollout.keep", "keeps nothing to train on"),
    ("kept-samples", ["rollout.keep={best: 6, worst: 2}"], "rollout.keep", "keeps 6 + 2 of 8 completions, which is all of them"),
    (
        "kept-samples",
        ["rollout.keep={}", "algorithm.kl={coefficient: 0.1, estimator: k1, place: reward}"],
        "rollout.keep",
        "does not go together with the KL term in the reward",
    ),
    *(
        ("remembered-rows", ["data.train={path: t.jsonl, streaming: true}", f"{key}={{}}"], key, "does not go together with a streamed training set")
        for key in ("rollout.replay", "data.curriculum")
    ),
    (
        "label-sampling",
        ["rollout.by_label.default.max_new_tokens=1025"],
        "rollout.by_label.default.max_new_tokens",
        "must be at most `rollout.max_new_tokens`, got 1025 above 1024",
    ),
    (
        "label-sampling",
        ["rollout.by_label.default={min_new_tokens: 9, max_new_tokens: 8}"],
        "rollout.by_label.default.min_new_tokens",
        "its shortest completion has 9 tokens, its longest 8",
    ),
    ("label-sampling", ["rollout.by_label.default.top_k=1"], "rollout.by_label.default.top_k", "must not be 1 in training"),
    (
        "label-sampling",
        ["rollout.by_label.default.min_new_tokens=2", "rollout.structured.regex=a+"],
        "rollout.by_label.default.min_new_tokens",
        "must be 0 with `structured`",
    ),
    (
        "first-token",
        ["rollout={engine: fake, first_token_temperature: 5.0}"],
        "rollout.first_token_temperature",
        "needs the engine `hf`, not `fake`",
    ),
    ("curriculum-kind", ["data.curriculum.kind=python"], "data.curriculum", "`kind: python` needs `python`: the class, as `module:class`"),
    ("curriculum-kind", ["data.curriculum.python='a:B'"], "data.curriculum.python", "has no effect without `kind: python`"),
    ("curriculum-kind", ["data.curriculum.options={a: 1}"], "data.curriculum.options", "has no effect without `kind: python`"),
    (
        "curriculum-kind",
        ["data.curriculum={kind: python, python: 'a:B', share: 0.3}"],
        "data.curriculum.share",
        "has no effect with `kind: python`",
    ),
    ("estimator-keys", ["algorithm.advantage.baseline=batch"], "algorithm.advantage.baseline", "has no effect with `grpo`"),
    ("estimator-keys", ["algorithm.advantage.passk_std=true"], "algorithm.advantage.passk_std", "has no effect with `grpo`"),
    ("estimator-keys", ["algorithm.advantage.bootstrap_truncated=true"], "algorithm.advantage.bootstrap_truncated", "has no effect with `grpo`"),
    ("estimator-keys", ["algorithm.advantage.python='a:b'"], "algorithm.advantage.python", "has no effect with `grpo`"),
    ("estimator-keys", ["algorithm.advantage.options={n: 1}"], "algorithm.advantage.options", "has no effect with `grpo`"),
    ("estimator-keys", ["algorithm.advantage={kind: rloo, min_std: 0.1}"], "algorithm.advantage.min_std", "has no effect with `rloo`"),
    (
        "estimator-keys",
        ["algorithm.advantage={normalise_std: false, min_std: 0.1}"],
        "algorithm.advantage.min_std",
        "has no effect with `grpo` as it is set",
    ),
    ("own-estimator", ["algorithm.advantage.kind=python"], "algorithm.advantage.kind", "`python` needs a function"),
    (
        "gdpo-parts",
        ["algorithm={advantage: {kind: gdpo}, kl: {coefficient: 0.1, estimator: k1, place: reward}}"],
        "algorithm.kl.place",
        "must be `loss` for `gdpo`",
    ),
    ("teacher", ["algorithm.advantage.kind=distill"], "algorithm.advantage.kind", "`distill` needs a teacher"),
    (
        "teacher",
        ["algorithm.advantage.distill_coefficient=0.5"],
        "algorithm.advantage.distill_coefficient",
        "has no effect without `models.teacher`",
    ),
    (
        "teacher",
        ["models.teacher.path=org/t", "algorithm={advantage: {kind: distill}, kl: {coefficient: 0.1, estimator: k1, place: reward}}"],
        "algorithm.kl.place",
        "must be `loss` for `distill`",
    ),
    (
        "teacher",
        ["models.teacher.server='http://h:1'", "rollout.temperature=0.7"],
        "rollout.temperature",
        "must be 1 with `models.teacher.server`, got 0.7",
    ),
    (
        "teacher",
        ["models.teacher={path: org/t, placement: {gpus: 1}}", "rollout.temperature=0.7"],
        "rollout.temperature",
        "must be 1 with `models.teacher.placement`, got 0.7",
    ),
    (
        "teacher-place",
        ["models.teacher={path: org/t, placement: {gpus: 1}, offload: true}"],
        "models.teacher.offload",
        "has no effect with `placement`",
    ),
    (
        "teacher-place",
        ["models.teacher={server: 'http://h:1', placement: {gpus: 1}}"],
        "models.teacher.placement",
        "has no effect with `server`",
    ),
    (
        "teacher-place",
        ["models.teacher={path: org/t, placement: {gpus: 1, options: {tensor_parallel_size: 2}}}"],
        "models.teacher.placement.options.tensor_parallel_size",
        "has a key of its own: `models.teacher.placement.gpus`",
    ),
    ("teacher-place", ["models.teacher={}"], "models.teacher", "needs `path` or `server`"),
    ("teacher-place", ["models.teacher={path: org/t, server: 'http://h:1'}"], "models.teacher.server", "`path` and `server` exclude each other"),
    ("teacher-place", ["models.teacher={path: org/t, retries: 1}"], "models.teacher.retries", "has no effect with `path`"),
    ("teacher-place", ["models.teacher={server: 'http://h:1', dtype: float32}"], "models.teacher.dtype", "has no effect with `server`"),
    ("discount", ["algorithm.advantage={kind: reinforce_pp, gamma: 0.9}"], "algorithm.advantage.gamma", "has no effect with `reinforce_pp`"),
    *(
        ("group-of-one", ["rollout.samples_per_prompt=1", f"algorithm.advantage.kind={kind}"], "rollout.samples_per_prompt",
         f"must be at least 2 for `{kind}`, got 1")
        for kind in ("reinforce_pp_baseline", "opo", "gpg", "grpo_passk", "gdpo", "cpgd")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("code", "sets", "path", "message"), BREACHES)
def test_breaches(minimal: str, problems_of: Problems, code: str, sets: list[str], path: str, message: str) -> None:
    (problem,) = problems_of(minimal, sets=sets, known_rules=KNOWN)
    assert (problem.code, problem.path, problem.message) == (code, path, message)
    assert problem.place is not None and problem.hint


def test_every_rule_is_broken_above() -> None:
    assert {code for code, _, _, _ in BREACHES} == set(RULES) - set(LOSS_RULES)  # those have a file of their own


@pytest.mark.parametrize(
    "sets",
    [
        ["rollout.samples_per_prompt=1", "algorithm.advantage.kind=reinforce"],
        ["rollout.top_k=2"],
        ["batch={micro_batch_size: 4, tokens_per_micro_batch: auto}"],
        ["batch.rollouts_per_update=4", "batch.epochs=2"],
        [*PARTIAL, "rollout={over_sample: {factor: 3.0, slice_tokens: 64}, dynamic: {}, keep: {}, replay: {}}"],
        [*PARTIAL, "rollout.over_sample={}", "rollout.partial.budget_tokens=null"],
        [*PARTIAL, "algorithm.advantage.kind=remax", "rollout.samples_per_prompt=1"],
        [*PARTIAL, "algorithm.loss={old: auto, correction: {}}", "batch={updates_per_step: 2}"],
        [*PARTIAL, "algorithm.loss={kind: reinforce, options: {importance_weight: true}}"],
        ["train={optimizer: {kind: muon, options: {momentum: 0.9}}, deepspeed: {zero_stage: 0}}"],
        ["train={offload: {optimizer: cpu, parameters: cpu}}"],
        ["train={precision: {master: bfloat16, gradients: bfloat16}, compile: true}"],
        ["train.deepspeed.extra={zero_optimization: {reduce_bucket_size: 1000, zero_hpz_partition_size: 4}, wall_clock_breakdown: true}"],
        ["data.eval.e={path: b, samples_per_prompt: 4}", "eval={temperature: 1, pass_k: [4]}"],
        ["data.eval={e: {path: b}, f: {path: c, samples_per_prompt: 4}}", "eval={temperature: 1, pass_k: [4]}"],
        ["eval.every=5", "data.eval.e.path=b"],
        ["data.eval.e={path: b, samples_per_prompt: 2, sampling: {temperature: 1}}", "eval.vote_k=[2]"],
        ["eval.rewards.math=[{rule: exact}]", "data.eval.e={path: b, label: math}"],
        ["train.early_stop.metric=eval.a.b.mean@1", "data.eval={a: {path: a}, 'a.b': {path: b}}", "eval.every=pass"],
        ["train.early_stop={metric: reward_mean, mode: min}"],
        ["name='{date}-{time}-{model}-{recipe}-{seed}'"],
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
        ["data.train={path: org/name, split: train, options: {name: main}}"],
        ["data.train.streaming=true"],
        ["data.train=[{name: train1, path: a}, {name: train, path: b}]"],
        ["rollout={min_new_tokens: 8, max_new_tokens: 8}"],
        ["rollout={min_new_tokens: 8, max_new_tokens: auto}"],
        ["rollout={structured: {json_schema: {type: object}}, penalties: {presence: 1}, logit_bias: {'3': 1, sun: 2}, stop: [a], top_p: 0.9}"],
        ["rollout={engine: fake, penalties: {presence: 0}, logit_bias: {}, bad_words: [], structured: null}"],
        ["rollout.hf={batch_rows: auto, batch_tokens: 100}"],
        ["train.optimizer.warmup_steps=10"],
        ["train={steps: null, data_passes: 0.5, optimizer: {warmup_steps: 1000}}"],
        ["train.optimizer={min_lr: 1e-6, schedule: cosine}"],
        ["algorithm.advantage.std=batch"],
        ["algorithm.advantage={kind: rloo, normalise_std: false}"],
        ["models.policy.lora={options: {use_dora: true, use_rslora: true, init_lora_weights: gaussian, exclude_modules: [o_proj]}}"],
        ["models.policy.lora={targets: [], options: {target_parameters: [experts.gate_up_proj]}}"],
        ["models.policy.lora={start_from: org/adapter, dropout: 0.1}"],
        ["models.policy={lora: {}, quantise: {bits: 8}}", "train.deepspeed.zero_stage=2"],
        ["models.policy={ema: {evaluate: true}, revision: main}"],
        ["algorithm.advantage={kind: reinforce, baseline: batch, whiten: all}"],
        ["algorithm.advantage={kind: grpo_passk, passk_std: true, min_std: 0.1}"],
        ["algorithm.advantage={kind: gdpo, min_std: 0.1}", "algorithm.kl.coefficient=0.1"],
        ["algorithm.advantage={kind: python, python: 'a.b:c', options: {n: 1}}", "rollout.samples_per_prompt=1"],
        ["algorithm.advantage={kind: remax}", "rollout.samples_per_prompt=1"],
        ["algorithm.advantage.kind=reinforce_pp", "algorithm.kl={coefficient: 0.1, estimator: k1, place: reward, level: token}"],
        ["models.teacher={path: org/t, dtype: bfloat16, offload: true}", "algorithm.advantage.kind=distill", "rollout.temperature=0.7"],
        ["models.teacher={path: org/t, placement: {gpus: 2, memory_share: 0.5}, retries: 1}", "algorithm.advantage.kind=distill"],
        ["models.teacher={server: 'http://h:1', api: sglang, retries: 0}", "algorithm.advantage.distill_coefficient=0.3"],
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
    assert {"grpo", "rloo"} < GROUP_ESTIMATORS
