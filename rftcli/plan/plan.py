"""The plan: what will happen, as frozen data. Printable, hashable, diffable; every rank gets the same one and decides nothing itself.

Leaves out how it is made (`compile.py`) and how it is shown (`show.py`). Quantities that follow from others are stored, not recomputed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rftcli.codec import from_data, to_data
from rftcli.data.spec import ChatSpec, DataSpec
from rftcli.rewards.spec import PartSpec

PLAN_FORMAT = 1
PROBE_EVERY = 50
"""Steps between two comparisons of the engine's log-probs with the trainer's; the first step is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan:
    ranks: int
    device: str
    """cpu or cuda"""
    backend: str
    """gloo or nccl"""
    threads_per_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    path: str
    """A directory, a GGUF file or a hub id: `builtin:` names are resolved."""
    given: str
    """As the recipe writes it."""
    dtype: str
    attention: str
    dropout: float
    gradient_checkpointing: bool
    trust_remote_code: bool
    options: Mapping[str, Any]
    parameters: int | None
    """Number of parameters if it could be read without loading the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    train: tuple[DataSpec, ...]
    eval: tuple[DataSpec, ...]
    shuffle: bool
    overlong_prompt: str
    max_prompt_tokens: int
    chat: ChatSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    engine: str
    shares_weights: bool
    """The engine reads the trainer's own module; False: it keeps a replica that is refilled after every update."""
    batch_rows: int
    """Rows of every forward pass of the hf engine: fixed, so that a row's bits do not depend on its neighbours or on the number of ranks."""
    samples_per_prompt: int
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    labels: Mapping[str, tuple[PartSpec, ...]]
    max_error_rate: float
    score_prefill: bool
    search_path: str
    """Folder of the recipe: user modules are imported from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantagePlan:
    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    kind: str
    options: Mapping[str, Any]
    aggregate: str
    kl_coefficient: float
    kl_estimator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    prompts_per_step: int
    samples_per_prompt: int
    updates_per_step: int
    epochs: int
    micro_batch_size: int
    """Rows of one backward pass of one rank; the last one of an update may be smaller."""
    layout: str
    """padded or packed"""
    equation: str
    needs_prepass: str | None
    """Why old log-probs are computed in a pass of their own before the first update; None: old = sg(new)."""

    @property
    def optimizer_updates_per_step(self) -> int:
        return self.updates_per_step * self.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    kind: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    schedule: str
    warmup_updates: int
    min_lr: float
    schedule_updates: int
    """Horizon of the schedule in optimizer updates; stays when a run is made longer."""
    max_grad_norm: float | None
    skip_at_most: int
    zero_stage: int
    deepspeed: Mapping[str, Any]
    """The configuration handed to DeepSpeed, whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    before_training: bool
    every: int
    at_end: bool
    temperature: float
    max_new_tokens: int
    pass_k: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBestPlan:
    set: str
    metric: str
    """Of the set's evaluation: mean@1, pass@4, ..."""
    highest: bool
    """Is more better?"""
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    every: int
    every_minutes: float | None
    before_deadline: bool
    deadline_margin_seconds: float
    keep: int
    keep_best: KeepBestPlan | None
    max_gib: float | None
    trainer_state: bool
    save_hf: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackPlan:
    tensorboard: str | None
    wandb: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    name: str
    seed: int
    steps: int
    max_hours: float | None
    """Of one attempt, from its start."""
    world: WorldPlan
    policy: ModelPlan
    reference: ModelPlan | None
    """None where nothing needs a reference."""
    data: DataPlan
    rollout: RolloutPlan
    rewards: RewardPlan
    advantage: AdvantagePlan
    loss: LossPlan
    batch: BatchPlan
    learner: LearnerPlan
    eval: EvalPlan
    checkpoint: CheckpointPlan
    track: TrackPlan
    notes: tuple[str, ...] = ()
    """Decisions taken for the person, each with its reason; warnings of the compiler."""
    format: int = field(default=PLAN_FORMAT)

    def evaluates(self, step: int) -> bool:
        """Is there an evaluation after `step` (1-based)?"""
        if not self.data.eval:
            return False
        return (self.eval.every > 0 and step % self.eval.every == 0) or (self.eval.at_end and step == self.steps)

    def probes(self, step: int) -> bool:
        """Does the engine report its log-probs in `step`, to be compared with the trainer's? Only where it samples from the distribution that is
        trained on: no filter, no forced length, a real engine."""
        rollout = self.rollout
        plain = (rollout.top_p, rollout.top_k, rollout.min_p, rollout.min_new_tokens) == (1.0, 0, 0.0, 0)
        return plain and rollout.engine != "fake" and step % PROBE_EVERY == 1

    def saves(self, step: int) -> bool:
        """Is there a checkpoint after `step` (1-based)? The last step always has one."""
        best = self.checkpoint.keep_best is not None and self.evaluates(step)  # what may be the best has to be there
        return step == self.steps or best or (self.checkpoint.every > 0 and step % self.checkpoint.every == 0)


def plan_to_json(plan: Plan) -> str:
    return json.dumps(to_data(plan), indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def plan_from_json(text: str) -> Plan:
    """Raises ValueError when the text is not a plan of this format."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT:
        raise ValueError(f"not a plan of format {PLAN_FORMAT}")
    return from_data(Plan, data)


def plan_hash(plan: Plan) -> str:
    """Sixteen hex digits over everything in the plan."""
    return hashlib.sha256(plan_to_json(plan).encode()).hexdigest()[:16]
