"""Recipes that several tests of this room start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from rftcli.errors import EXIT_USAGE, RecipeError
from rftcli.recipe.load import load_text
from rftcli.recipe.problems import Problem

MINIMAL = """\
models: {policy: {path: org/model}}
data: {train: {path: train.jsonl}}
rewards: {default: [{rule: exact}]}
train: {steps: 10}
"""

FULL = """\
name: full
seed: 7
extends: []
models:
  policy:
    path: org/model
    revision: v1.0
    tokenizer: org/tokenizer
    tokenizer_options: {clean_up_tokenization_spaces: false}
    add_tokens: [<plan>]
    trust_remote_code: false
    dtype: float32
    attention: eager
    quantise:
      bits: 4
      kind: fp4
      nested: true
    dropout: 0.1
    freeze: []
    gradient_checkpointing: true
    options: {low_cpu: true}
    router_loss: 0.01
    lora:
      rank: 8
      alpha: 16
      dropout: 0.1
      targets: [q_proj, v_proj]
      save_also: [embed_tokens]
      options: {use_rslora: true}
    ema:
      decay: 0.9
      evaluate: false
      export: true
    chat:
      template: "{{ messages }}"
      options: {thinking: false}
      system: be brief
      prefill: <think>
      score_prefill: false
  reference:
    from: other/model
    refresh:
      every: 5
      mix: 0.5
    offload: true
    shard: false
  critic:
    from: some/critic
    head: v_head
    optimizer:
      kind: adamw
      lr: 2e-5
      betas: [0.8, 0.9]
      eps: 1e-7
      weight_decay: 0.01
      schedule: linear
      warmup_steps: 0
      min_lr: 1e-7
      schedule_steps: 200
      options: {amsgrad: true}
      no_decay: ['*bias']
    value_clip: 0.3
    warmup_steps: 5
    max_grad_norm: 0.5
  scorers:
    helpful:
      kind: classifier
      path: some/reward-model
      revision: v2
      tokenizer: org/words
      template: "{{ messages[0].content }}"
      dtype: bfloat16
      trust_remote_code: true
      quantise: {bits: 4, kind: fp4, nested: true}
      options: {low_cpu: true}
      max_tokens: 512
      overlong: cut_left
      batch_tokens: 2048
      head: 0.5*h[0] - h[2]
      offload: false
      shard: false
      cache: true
    judge:
      kind: generative
      path: some/judge
      prompt: "is it good? {{ completion }}"
      score: {regex: 'score: (.+)', scale: 0.1}
      max_new_tokens: 64
      temperature: 0.5
      samples: 2
      placement: {server: 'http://127.0.0.1:8000/v1'}
      api: completions
    strict:
      kind: generative
      path: some/judge
      prompt: "{{ completion }}?"
      score: {token: good, against: [bad]}
    apart:
      kind: generative
      path: some/judge
      revision: v3
      prompt: "is {{ completion }} good?"
      score: {regex: '(\\d+)'}
      max_tokens: 4096
      placement:
        gpus: 4
        tensor_parallel: 2
        memory_share: 0.8
        ready_seconds: 900.0
        command: [/venv/bin/vllm, serve]
        options: {quantization: awq}
    beside:
      kind: generative
      path: some/judge
      prompt: "{{ completion }}, or not?"
      score: {regex: '(\\d+)'}
      engine: vllm
      options: {quantization: fp8}
    fields:
      kind: generative
      path: some/judge
      prompt: "{{ completion }}!"
      score: {json: verdict.score}
    service:
      kind: http
      preset: lightrft
      urls: ['http://127.0.0.1:5000/score']
      score_field: scores
      batch_size: 4
      timeout_seconds: 5.0
      retries: 1
      concurrency: 2
      per_minute: 600.0
      headers_env: {Authorization: REWARD_TOKEN}
    own:
      kind: python
      python: my_rewards:Model
      memory_gib: 2.0
  teacher:
    path: org/teacher
    revision: v2
    dtype: bfloat16
    offload: true
data:
  train:
    - name: first
      path: a.jsonl
      weight: 0.7
      limit: 100
      where: level >= 3
      template: '{question}:'
      streaming: false
      as_chat: false
      label: math
      system: count
      columns:
        prompt: question
        reference: answer.value
        label: kind
        id: key
      extract_reference: '#### (.*)'
    - name: second
      python: my_rows:rows
      options: {size: 3}
      label: math
    - name: hub
      path: org/name
      split: train
      label: math
  eval:
    held_out:
      path: b.jsonl
      label: math
      samples_per_prompt: 4
      sampling: {temperature: 0.7, top_p: 0.9, top_k: 20, min_p: 0.05, max_new_tokens: 24, min_new_tokens: 2}
  seed: 3
  curriculum:
    kind: pass_rate
    range: [0.2, 0.8]
    share: 0.2
    metric: right
    pass_mark: 0.5
    memory: 0.25
  check_reference: refuse
  shuffle: false
  overlong_prompt: drop
rollout:
  engine: hf
  samples_per_prompt: 4
  max_prompt_tokens: 64
  max_new_tokens: 32
  min_new_tokens: 1
  temperature: 0.9
  top_p: 0.95
  top_k: 50
  min_p: 0.01
  stop: ["\\n\\n"]
  stop_token_ids: [3, 4]
  ignore_eos: true
  penalties:
    repetition: 1.1
    presence: 0.1
    frequency: 0.2
  logit_bias: {"7": 1.5, sun: -2.0}
  bad_words: [never]
  first_token_temperature: 5.0
  by_label:
    math:
      temperature: 0.7
      top_p: 0.8
      top_k: 40
      min_p: 0.02
      max_new_tokens: 24
      min_new_tokens: 2
      stop: ["."]
      stop_token_ids: [5]
  dynamic:
    max_extra_rollouts: 2
    range: [0.1, 0.9]
    metric: right
  replay:
    after_steps: 5
    times: 2
    share: 0.5
    max_waiting: 100
    below: 0.5
  hf:
    batch_rows: 16
    continuous: true
    options:
      typical_p: 0.9
      epsilon_cutoff: 0.001
      eta_cutoff: 0.002
      no_repeat_ngram_size: 4
      suppress_tokens: [5]
  vllm:
    tensor_parallel: 1
    memory_share: 0.4
    process: inside
    server: null
    max_model_tokens: 128
    max_sequences: 64
    sleep: 1
    seeds: engine
    lora: merged
    check_weights: false
    options: {block_size: 32}
  sglang:
    tensor_parallel: 1
    memory_share: 0.4
    max_model_tokens: 128
    max_sequences: 64
    sleep: 1
    seeds: engine
    check_weights: false
    options: {attention_backend: triton}
rewards:
  math:
    combine:
      python: my_rewards:whole
      options: {scale: 2}
    renormalise: false
    parts:
      - rule: exact
        name: right
        weight: 0.9
        options: {}
        on_error: abstain
        text: keep_special
        clip: [-1.0, 1.0]
        timeout_seconds: 5.0
      - python: my_rewards:brevity
        weight: 0.1
      - model: helpful
        weight: 0.1
reward_shaping:
  truncated: penalise
  truncated_factor: 0.5
  missing_eos_penalty: 0.1
  overlong:
    buffer: 8
    factor: 0.5
  running_norm: scale
  clip: [-2.0, 2.0]
  max_error_rate: 0.5
algorithm:
  advantage:
    kind: gae
    normalise_std: false
    std: group
    whiten: all
    clip: 5.0
    gamma: 0.99
    lam: 0.95
    bootstrap_truncated: true
    distill_coefficient: 0.5
  loss:
    kind: clip_cov
    clip_low: 0.1
    clip_high: 0.3
    dual_clip: 3.0
    aggregate: fixed_length
    options: {share: 0.001}
    old: recompute
    off_policy_mask: 0.1
    entropy_coefficient: 0.01
    entropy_controller:
      target: 0.3
      delta: 0.001
      min: 0.001
      max: 0.1
    top_entropy_share: 0.2
  kl:
    coefficient: 0.001
    estimator: k2
    place: reward
    level: mean
    unbiased_gradient: false
    ratio_weighted: false
    controller:
      kind: adaptive
      target: 0.05
      horizon: 5000
batch:
  prompts_per_step: 16
  updates_per_step: 2
  epochs: 2
  rollouts_per_update: 1
  micro_batch_size: 4
  tokens_per_micro_batch: auto
  layout: packed
  share_prompts: false
  balance: false
  skip_zero_advantage: false
train:
  steps: 100
  max_hours: 2.5
  max_tokens: 1000000
  max_grad_norm: 0.5
  optimizer:
    kind: adamw
    lr: 1e-5
    betas: [0.8, 0.9]
    eps: 1e-7
    weight_decay: 0.01
    no_decay: ['*bias']
    options: {amsgrad: true}
    schedule: cosine
    warmup_steps: 5
    min_lr: 1e-7
    schedule_steps: 200
  precision:
    master: float32
    gradients: bfloat16
    reduce: bfloat16
  offload:
    optimizer: cpu
    parameters: none
  compile: true
  kernels: none
  deterministic: true
  freeze_policy_steps: 2
  supervised:
    data:
      python: my_rows:answers
      path: null
      options: {size: 3}
      limit: 50
      system: count
      as_chat: true
      columns:
        prompt: question
        reference: answer
    coefficient: 0.2
    rows_per_update: 8
  deepspeed:
    zero_stage: 2
    extra: {zero_optimization: {overlap_comm: true}}
  nonfinite:
    skip_at_most: 1
  early_stop:
    metric: reward_mean
    patience: 5
    mode: min
    min_delta: 0.01
eval:
  before_training: false
  every: 10
  at_end: false
  temperature: 0.5
  max_new_tokens: 16
  pass_k: [1, 4]
  vote_k: [2]
  weights: ema
  rewards:
@REWARDS@samples:
  every: 2
  max: 100
checkpoint:
  every: 20
  every_minutes: 30.0
  before_deadline: true
  deadline_margin_seconds: 120.0
  keep: 2
  keep_best:
    metric: eval.held_out.mean@4
    mode: min
    keep: 2
  max_gib: 100.0
  background: false
  trainer_state: true
  save_hf: false
track:
  tensorboard: true
  wandb:
    project: p
    entity: e
    group: g
    name: n
    tags: [a, b]
    mode: offline
    upload_samples: 3
  python: my_observer:Mine
launch:
  env: {NCCL_DEBUG: INFO}
  timeout_minutes: 5.0
profile:
  steps: [2, 3]
  tool: torch
  ranks: all
"""
_REWARDS = FULL.split("\nrewards:\n", 1)[1].split("\nreward_shaping:", 1)[0] + "\n"
FULL = FULL.replace("@REWARDS@", indent(_REWARDS, "  "))
"""Every supported key but those that others exclude (`train.data_passes`, `rollout.structured`, `rollout.hf.batch_tokens`,
`models.policy.lora.start_from`, `rollout.keep`, `rollout.over_sample`, `rollout.partial`, `data.curriculum.python` and `options`, `streaming` true,
keys of other estimators than gae, keys of a teacher's server, keys of `rollout.vllm.server`),
each with a value that is not its default where it has another."""

Problems = Callable[..., list[Problem]]


@pytest.fixture
def minimal() -> str:
    return MINIMAL


@pytest.fixture
def full() -> str:
    return FULL


@pytest.fixture
def problems_of() -> Problems:
    """The problems of a recipe's text, which has some."""

    def find(text: str, **arguments: object) -> list[Problem]:
        arguments.setdefault("env", {})
        with pytest.raises(RecipeError) as caught:
            load_text(text, **arguments)  # type: ignore[arg-type]
        assert caught.value.exit_code == EXIT_USAGE == 2
        found = [item for item in caught.value.problems if isinstance(item, Problem)]
        assert found and len(found) == len(caught.value.problems)
        return found

    return find


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Write a file below the test's folder."""

    def make(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make
