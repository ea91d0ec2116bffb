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
from rftcli.plan.plan_batch import BatchPlan
from rftcli.plan.plan_engine import EnginePlan, SglangPlan, VllmPlan
from rftcli.plan.plan_loss import AdvantagePlan, KlPlan, LossPlan
from rftcli.plan.plan_memory import MemoryPlan
from rftcli.plan.plan_models import EmaPlan, LoraPlan, QuantisePlan, ReferencePlan, ServerPlan
from rftcli.plan.plan_rewards import ShapingPlan
from rftcli.plan.plan_run import CheckpointPlan, LaunchPlan, ProfilePlan, TrackPlan
from rftcli.plan.plan_sampling import CurriculumPlan, DynamicPlan, KeepPlan, LabelSampling, OverSamplePlan, PartialPlan, ReplayPlan
from rftcli.rewards.scorers.spec import ScorerSpec, StartSpec
from rftcli.rewards.spec import CombineSpec, PartSpec

PLAN_FORMAT = 2
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
    deterministic: bool = False
    """Only kernels with repeatable results run."""
    nodes: int = 1
    """Machines; every one runs ranks / nodes of the ranks, in order."""


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
    revision: str | None = None
    """Commit of a hub id; None for files on this machine."""
    tokenizer: str | None = None
    """Path of another tokenizer than the model's own."""
    tokenizer_revision: str | None = None
    tokenizer_options: Mapping[str, Any] = field(default_factory=dict)
    add_tokens: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    """Shell patterns over whole parameter names."""
    lora: LoraPlan | None = None
    quantise: QuantisePlan | None = None
    ema: EmaPlan | None = None
    kernels: str = "none"
    """none or liger: fused kernels in place of the model's norms, gated layers and rotary embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    train: tuple[DataSpec, ...]
    eval: tuple[DataSpec, ...]
    seed: int
    """Key of the order of the rows."""
    shuffle: bool
    check_reference: str
    """off, warn or refuse"""
    overlong_prompt: str
    max_prompt_tokens: int
    chat: ChatSpec
    curriculum: CurriculumPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    engine: str
    shares_weights: bool
    """The engine reads the trainer's own module; False: it keeps a replica that is refilled after every update."""
    batch_rows: int
    """Rows of every forward pass of the hf engine where their number changes bits: fixed, so that a row's bits do not depend on its neighbours or on
    the number of ranks."""
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
    lengths_vary: bool = True
    """Answers may end before their longest length."""
    most_rows: int | None = None
    """The most rows of a pass where their number changes no bits (float32 on a CPU); None: `batch_rows`."""
    batch_tokens: int | None = None
    """Limit on rows x (padded prompt + new tokens) of a decode pass; `batch_rows` is then the most rows. None: always `batch_rows`."""
    continuous: bool = False
    """A waiting row takes the place of a finished one."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    structured: Mapping[str, Any] | None = None
    """{"regex": pattern} or {"json_schema": schema}"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further sampling options of the engine; what is off is absent."""
    first_token_temperature: float | None = None
    """Of the first token alone; None: as all others."""
    by_label: Mapping[str, LabelSampling] = field(default_factory=dict)
    """Labels that are sampled in a way of their own."""
    dynamic: DynamicPlan | None = None
    over_sample: OverSamplePlan | None = None
    partial: PartialPlan | None = None
    keep: KeepPlan | None = None
    replay: ReplayPlan | None = None
    greedy_twin: bool = False
    """Each prompt has one more completion, sampled greedily and scored, that is a baseline and is not trained on."""
    vllm: VllmPlan | None = None
    """None for other engines, as the next."""
    sglang: SglangPlan | None = None

    @property
    def own_engine(self) -> EnginePlan | None:
        """The engine with a model of its own, which weights are pushed to; None: the engine shares the trainer's, or needs none."""
        return self.vllm if self.vllm is not None else self.sglang

    @property
    def reshaped_by(self) -> tuple[str, ...]:
        """Recipe keys that make the sampled distribution another one than the trained one, which is the model's at the temperature."""
        off = {
            "top_p": self.top_p == 1.0, "top_k": self.top_k == 0, "min_p": self.min_p == 0.0, "min_new_tokens": self.min_new_tokens == 0,
            "penalties": (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (1.0, 0.0, 0.0),
            "logit_bias": not self.logit_bias, "bad_words": not self.bad_words, "structured": self.structured is None,
        }  # fmt: skip
        own = tuple(f"by_label.{label}" for label, sampling in self.by_label.items() if sampling.filters)
        return (*(name for name, absent in off.items() if not absent), *(f"{self.engine}.options.{name}" for name in self.options), *own)

    @property
    def samples_the_model(self) -> bool:
        """The sampled distribution is the trained one, so that log-probs of engine and trainer agree but for rounding."""
        return not self.reshaped_by and self.engine != "fake"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    labels: Mapping[str, tuple[PartSpec, ...]]
    max_error_rate: float
    score_prefill: bool
    search_path: str
    """Folder of the recipe: user modules are imported from there."""
    combine: Mapping[str, CombineSpec] = field(default_factory=dict)
    """By label; one that is not here is a plain sum."""


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
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer."""
    no_decay: tuple[str, ...] = ()
    """Patterns of the names of parameters without weight decay."""
    compile: bool = False
    """The model's layers are compiled for passes of the update."""
    from_host: bool = False
    """The model is loaded into the machine's memory and cut from there (ZeRO 3), because no device holds it whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSampling:
    """How the completions of one evaluation set are sampled; the rest is as in the rollout."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    min_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticPlan:
    model: ModelPlan
    head: str | None
    """Name of the value head among the weights; None: the model class's own, or a new one."""
    learner: LearnerPlan
    value_clip: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPlan:
    """The model that the policy is distilled from: `model` or `server`; both where the run starts the server."""

    model: ModelPlan | None
    offload: bool
    server: ServerPlan | None
    start: StartSpec | None = None
    """Of its server, whose address is known when it has been started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedPlan:
    data: DataSpec
    coefficient: float
    rows_per_update: int
    """Over all ranks."""
    max_answer_tokens: int
    """Longer answers are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    before_training: bool
    every: int
    """Steps between evaluations; 0: none, or `every_draws` says when."""
    every_draws: int
    """Instead of `every`: an evaluation after the step in which so many more prompts have been drawn (one pass over the rows); 0 is off."""
    at_end: bool
    temperature: float
    max_new_tokens: int
    pass_k: tuple[int, ...]
    vote_k: tuple[int, ...]
    sampling: Mapping[str, EvalSampling]
    """By evaluation set."""
    rewards: RewardPlan | None
    """None: those of training."""
    weights: str = "live"
    """live, or ema: the running mean"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopPlan:
    """The run ends when `metric` was not better than its best by more than `min_delta` for `patience` values in a row."""

    metric: str
    patience: int
    mode: str
    """max or min"""
    min_delta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesPlan:
    every: int
    max: int | None
    """Completions written per step, whole groups; None writes all."""

    def writes(self, step: int) -> bool:
        return (step - 1) % self.every == 0


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
    early_stop: EarlyStopPlan | None
    samples: SamplesPlan
    checkpoint: CheckpointPlan
    track: TrackPlan
    launch: LaunchPlan = field(default_factory=LaunchPlan)
    profile: ProfilePlan = field(default_factory=ProfilePlan)
    notes: tuple[str, ...] = ()
    """Decisions taken for the person, each with its reason; warnings of the compiler."""
    kl: KlPlan | None = None
    """None where there is no KL term."""
    critic: CriticPlan | None = None
    freeze_policy_steps: int = 0
    """Steps at the start in which only the critic learns."""
    supervised: SupervisedPlan | None = None
    reference_use: ReferencePlan | None = None
    """None where there is no reference."""
    max_tokens: int | None = None
    """Of the whole run: it ends with the step that reaches them."""
    shaping: ShapingPlan = field(default_factory=ShapingPlan)
    scorers: tuple[ScorerSpec, ...] = ()
    """Models and services that parts of rewards use, those of evaluation too."""
    teacher: TeacherPlan | None = None
    memory: MemoryPlan | None = None
    """None where the model's files do not tell its widths."""
    format: int = field(default=PLAN_FORMAT)

    def trains_policy(self, step: int) -> bool:
        """Is the policy updated in `step` (1-based), or only the critic?"""
        return step > self.freeze_policy_steps

    def evaluates(self, step: int) -> bool:
        """Is there an evaluation after `step` (1-based)?"""
        if not self.data.eval:
            return False
        every, draws, drawn = self.eval.every, self.eval.every_draws, self.batch.prompts_per_step
        passed = draws > 0 and step * drawn // draws > (step - 1) * drawn // draws
        return (every > 0 and step % every == 0) or passed or (self.eval.at_end and step == self.steps)

    @property
    def eval_rewards(self) -> RewardPlan:
        """What scores the evaluation sets."""
        return self.rewards if self.eval.rewards is None else self.eval.rewards

    def probes(self, step: int) -> bool:
        """Does the engine report its log-probs in `step`? Where the loss reads them always; else to be compared with the trainer's, where it samples
        from the distribution that is trained on: no filter, no forced length, a real engine."""
        return self.loss.reads_sampler or (self.rollout.samples_the_model and step % PROBE_EVERY == 1)

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
