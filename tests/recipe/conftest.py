"""Recipes that several tests of this room start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
    trust_remote_code: false
    dtype: float32
    attention: eager
    dropout: 0.1
    gradient_checkpointing: true
    options: {low_cpu: true}
    chat:
      template: "{{ messages }}"
      options: {thinking: false}
      system: be brief
      prefill: <think>
      score_prefill: false
  reference:
    from: other/model
data:
  train:
    - name: first
      path: a.jsonl
      weight: 0.7
      limit: 100
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
  eval:
    held_out:
      path: b.jsonl
      label: math
      samples_per_prompt: 4
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
  hf:
    batch_rows: 16
rewards:
  math:
    combine: sum
    parts:
      - rule: exact
        name: right
        weight: 0.9
        options: {}
        on_error: abstain
        text: keep_special
      - python: my_rewards:brevity
        weight: 0.1
reward_shaping:
  max_error_rate: 0.5
algorithm:
  advantage:
    kind: grpo
    normalise_std: true
    std: batch
  loss:
    kind: ppo_clip
    clip_low: 0.1
    clip_high: 0.3
    dual_clip: 3.0
    aggregate: fixed_length
  kl:
    coefficient: 0.001
    estimator: k2
    place: loss
batch:
  prompts_per_step: 16
  updates_per_step: 2
  epochs: 2
  micro_batch_size: 4
  layout: packed
train:
  steps: 100
  max_grad_norm: 0.5
  optimizer:
    kind: adamw
    lr: 1e-5
    betas: [0.8, 0.9]
    eps: 1e-7
    weight_decay: 0.01
    schedule: cosine
    warmup_steps: 5
    min_lr: 1e-7
    schedule_steps: 200
  deepspeed:
    zero_stage: 2
  nonfinite:
    skip_at_most: 1
eval:
  before_training: false
  every: 10
  at_end: false
  temperature: 0.5
  max_new_tokens: 16
  pass_k: [1, 4]
checkpoint:
  every: 20
  keep: 2
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
"""Every supported key but `train.data_passes`, which excludes `train.steps`, each with a value that is not its default where it has another."""

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
