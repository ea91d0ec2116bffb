"""The sections of a recipe: every supported key with its type, range, default and one sentence of meaning. Defaults live here and nowhere else.

What is left out: reading YAML (`read`), rules across keys (`rules`), keys and values that the language has but this version lacks (`not_yet`).

How to add a key: one line here with a `description`; if it was in `not_yet.KEYS`, delete it there. How to add a value of a `Literal`: add it to the
table of the room that does the work, here, and delete it from `not_yet.VALUES`. A key that may be null has null as its default, because null in
a file takes back what a parent recipe wrote; where null says something else than the default does, it is kept (`kinds.null_has_a_meaning`).
Annotations are read at run time, so they are not postponed.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True, slots=True)
class PathText:
    """Marks text that names a file. `kind`: "file" is relative to the file that wrote it; "model" too if it exists there, else it is a hub id;
    "template" is a file unless it holds a `{` of Jinja; "output" is relative to the working directory of the run."""

    kind: Literal["file", "model", "template", "output"]
    word: str | None = None
    """A word that is no path."""


class Section(BaseModel):
    """What all sections share: unknown keys are refused, nothing is coerced, nothing can be changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True, protected_namespaces=())


FilePath = Annotated[str, PathText("file"), Field(min_length=1)]
ModelPath = Annotated[str, PathText("model"), Field(min_length=1)]
OutputPath = Annotated[str, PathText("output"), Field(min_length=1)]
TemplateText = Annotated[str, PathText("template"), Field(min_length=1)]
Target = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
Name = Annotated[str, Field(pattern=r"^[^\s./\\][^/\\\n]*$")]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Options = dict[str, Any]


class Chat(Section):
    """How messages become the text of a prompt."""

    template: TemplateText | None = Field(None, description="Chat template: Jinja text, or a file that holds it; null takes the tokenizer's own.")
    options: Options = Field({}, description="Names that the chat template reads, such as `enable_thinking`.")
    system: str | None = Field(None, description="System turn for message lists that have none.")
    prefill: Text | None = Field(None, description="Beginning of every answer, written for the model as the end of the prompt.")
    score_prefill: bool = Field(True, description="Whether rewards see the prefill in front of the completion.")


class PolicyModel(Section):
    """The model that is trained."""

    path: ModelPath = Field(description="Model to train: a directory, a hub id, or `builtin:<name>`.")
    trust_remote_code: bool = Field(False, description="Whether code that comes with the model may run.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Number type of weights and activations; auto: float32 on a CPU, else bfloat16."
    )
    attention: Literal["auto", "eager", "sdpa"] = Field("auto", description="Attention implementation of the trainer.")
    dropout: Share = Field(0.0, description="Dropout probability in training; anything above 0 switches the on-policy shortcut off.")
    gradient_checkpointing: Literal["auto"] | bool = Field(
        "auto", description="Whether activations are computed again in the backward pass, which saves memory and costs time."
    )
    options: Options = Field({}, description="Further arguments of `from_pretrained`.")
    chat: Chat = Field(default_factory=Chat, description="How messages become the text of a prompt.")


class ReferenceModel(Section):
    """The frozen model that the KL term compares with; loaded only when something needs it."""

    from_: Annotated[str, PathText("model", word="policy"), Field(min_length=1)] = Field(
        "policy", alias="from", description="`policy` for the policy as it was before training, or another model's path."
    )


class Models(Section):
    """The models of a run."""

    policy: PolicyModel = Field(description="The model that is trained.")
    reference: ReferenceModel = Field(
        default_factory=ReferenceModel, description="The frozen model that the KL term compares with; loaded only when something needs it."
    )


class Columns(Section):
    """Which column of a row is what; a dotted name goes into nested objects."""

    prompt: Text = Field("prompt", description="Column of the prompt: text, or a list of messages.")
    reference: Text | None = Field(
        None, description="Column of the reference answer, needed in every row; null takes `answer` or `reference` where a row has one."
    )
    label: Text | None = Field(None, description="Column that names the reward entry of a row; null gives every row the label of its set.")
    id: Text | None = Field(None, description="Column of the row's own id; null numbers the rows.")


class DataSource(Section):
    """Where rows come from and how they are read; shared by training and evaluation sets."""

    path: FilePath | None = Field(None, description="File of rows: JSON Lines or JSON, relative to the recipe that names it.")
    python: Target | None = Field(None, description="Instead of a path: `module.path:function`, called with `options`, yields one mapping a row.")
    options: Options = Field({}, description="Arguments of the `python` function.")
    limit: Count | None = Field(None, description="Only the first so many rows; null takes all.")
    label: Text | None = Field(None, description="Reward entry that scores the rows of this set; null is `default`.")
    system: str | None = Field(None, description="System turn for the message lists of this set that have none.")
    as_chat: bool = Field(False, description="Whether a text prompt becomes one user message, so that the chat template applies to it.")
    columns: Columns = Field(default_factory=Columns, description="Which column of a row is what.")
    extract_reference: Text | None = Field(
        None, description="Regular expression with one group: the reference is what the group finds first in the column."
    )


class TrainSource(DataSource):
    """One training set."""

    name: Name | None = Field(None, description="Name of the set in logs and row ids; null: `train`, `train1`, ...")
    weight: float = Field(1.0, gt=0, description="Share of the draws, relative to the other training sets.")


class EvalSource(DataSource):
    """One evaluation set."""

    samples_per_prompt: Count = Field(1, description="Completions of each prompt in evaluation.")


class Data(Section):
    """What the run trains on and is evaluated on."""

    train: tuple[TrainSource, ...] = Field(description="The training set, or a list of sets with weights.")
    eval: dict[Name, EvalSource] = Field({}, description="Evaluation sets by name.")
    shuffle: bool = Field(True, description="Whether every pass over the data has a new order, keyed by the seed.")
    overlong_prompt: Literal["refuse", "drop", "cut_left", "cut_right"] = Field(
        "refuse", description="What happens to a prompt of more than `rollout.max_prompt_tokens`; drops and cuts are counted."
    )


class HfEngine(Section):
    """Settings of the `hf` engine."""

    batch_rows: Literal["auto"] | Count = Field("auto", description="Completions decoded together in one forward pass.")


class Rollout(Section):
    """How completions are sampled for training."""

    engine: Literal["auto", "hf", "fake"] = Field("auto", description="Engine that samples; `fake` needs no model and is meant for tests.")
    samples_per_prompt: Count = Field(8, description="Completions of each prompt: the size of a group.")
    max_prompt_tokens: Count = Field(1024, description="Longest prompt in tokens.")
    max_new_tokens: Count = Field(1024, description="Longest completion in tokens.")
    min_new_tokens: NonNegative = Field(0, description="Shortest completion in tokens; no end token is sampled before.")
    temperature: float = Field(1.0, ge=0, description="What the logits are divided by before sampling; log-probs are taken at the same temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Samples from the smallest set of tokens that holds this probability mass; 1.0 is off.")
    top_k: NonNegative = Field(0, description="Samples from so many of the likeliest tokens; 0 is off.")
    min_p: Share = Field(0.0, description="Leaves out tokens below this share of the likeliest token's probability; 0.0 is off.")
    stop: tuple[Text, ...] = Field((), description="Strings that end a completion; they stay in its text.")
    stop_token_ids: tuple[NonNegative, ...] = Field((), description="Token ids that end a completion, beside the model's own end tokens.")
    ignore_eos: bool = Field(False, description="Whether sampling goes on after the model's end token.")
    hf: HfEngine = Field(default_factory=HfEngine, description="Settings of the `hf` engine.")


class RewardPart(Section):
    """One part of a reward: a rule by name, or a python function."""

    rule: Text | None = Field(None, description="Name of a built-in rule.")
    python: Target | None = Field(
        None,
        description="Instead of a rule: `module.path:function` that scores a completion. Its arguments may be any of prompt, completion, "
        "completion_ids, reference, label, columns, messages, finish, tokens, sample, draw, step, and its `options`; it returns a number, or None "
        "to abstain.",
    )
    name: Text | None = Field(None, description="Name of the part in logs and samples; null: the rule's or the function's own name.")
    weight: float = Field(1.0, description="What the part's value is multiplied with before the parts are summed; weights are not renormalised.")
    options: Options = Field({}, description="Arguments of the rule or function.")
    on_error: Literal["fail_sample", "abstain", "stop"] = Field(
        "fail_sample", description="When the part fails: the sample has no reward, the part is left out of the sum, or the run stops."
    )
    text: Literal["clean", "keep_special"] = Field("clean", description="Whether the part sees the completion without or with special tokens.")

    @property
    def shown_name(self) -> str:
        """The name in logs: the given one, else that of the rule or function."""
        return self.name or self.rule or (self.python or "").rpartition(":")[2]


class Reward(Section):
    """How completions of one label are scored."""

    combine: Literal["sum"] = Field("sum", description="How the values of the parts become one reward.")
    parts: tuple[RewardPart, ...] = Field(description="The weighted parts; a bare list of parts in the place of the entry means the same.")


class RewardShaping(Section):
    """What happens to rewards between the parts and the advantage."""

    max_error_rate: float = Field(0.05, ge=0, le=1, description="Share of a step's completions that may fail to be scored before the run stops.")


class Advantage(Section):
    """How rewards become advantages."""

    kind: Literal["grpo", "rloo", "reinforce"] = Field("grpo", description="Estimator of the advantage.")
    normalise_std: bool = Field(True, description="grpo: whether the centred reward is divided by a standard deviation; false is Dr. GRPO.")
    std: Literal["group", "batch"] = Field("group", description="grpo: which rewards the standard deviation is taken over.")


class Loss(Section):
    """The policy loss."""

    kind: Literal["ppo_clip"] = Field("ppo_clip", description="Policy loss per token.")
    clip_low: float = Field(0.2, gt=0, le=1, description="How far the ratio may fall below 1 before its gradient is cut.")
    clip_high: float = Field(0.2, gt=0, description="How far the ratio may rise above 1 before its gradient is cut.")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Upper bound of the loss per unit of negative advantage, usually 3; null is off."
    )
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = Field(
        "token_mean", description="What the token losses of one optimizer update are divided by, over all ranks and micro-batches."
    )


class Kl(Section):
    """The penalty for leaving the reference model."""

    coefficient: float = Field(0.0, ge=0, description="Factor of the KL term; 0 loads no reference model.")
    estimator: Literal["k1", "k2", "k3", "abs"] = Field("k3", description="Estimate of the KL per token, from d = log-prob - reference log-prob.")
    place: Literal["loss"] = Field("loss", description="Where the KL term is added.")


class Algorithm(Section):
    """The mathematics of the update."""

    advantage: Advantage = Field(default_factory=Advantage, description="How rewards become advantages.")
    loss: Loss = Field(default_factory=Loss, description="The policy loss.")
    kl: Kl = Field(default_factory=Kl, description="The penalty for leaving the reference model.")


class Batch(Section):
    """How the completions of a step are cut into updates; global over ranks unless a name says micro."""

    prompts_per_step: Count = Field(64, description="Prompts of one step, over all ranks.")
    updates_per_step: Count = Field(1, description="Mini-batches that the step's completions are cut into, by whole groups.")
    epochs: Count = Field(1, description="How often the step's mini-batches are gone over.")
    micro_batch_size: Literal["auto"] | Count = Field("auto", description="Completions of one backward pass of one rank.")
    layout: Literal["auto", "padded", "packed"] = Field(
        "auto", description="Whether the completions of a micro-batch lie in padded rows or one after another in a single row."
    )


class Optimizer(Section):
    """The optimizer and its learning-rate schedule."""

    kind: Literal["adamw"] = Field("adamw", description="Optimizer.")
    lr: float = Field(1.0e-6, gt=0, le=1, description="Peak learning rate.")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="Decay of the running means of gradient and squared gradient.")
    eps: float = Field(1.0e-8, gt=0, description="What is added to the root of the squared gradient's mean.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay per update, times the learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="How the learning rate goes on after the warm-up.")
    warmup_steps: NonNegative = Field(0, description="Steps over which the learning rate rises from 0 to `lr`.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the schedule.")
    schedule_steps: Count | None = Field(
        None, description="Steps until the schedule's end, which stays when a run is made longer; null: the run's own."
    )


class DeepSpeed(Section):
    """What the recipe decides about DeepSpeed; the plan derives the rest."""

    zero_stage: Literal["auto", 0, 1, 2, 3] = Field("auto", description="What is sharded over ranks: nothing, optimizer, gradients, parameters too.")


class NonFinite(Section):
    """What happens when a gradient is not finite."""

    skip_at_most: NonNegative = Field(
        3, description="Updates in a row that may be skipped because a gradient was not finite; one more stops the run."
    )


class Train(Section):
    """How long and how fast the policy is trained; one of `steps` and `data_passes` is needed."""

    steps: Count | None = Field(None, description="Steps of the run: one rollout and its updates each.")
    data_passes: Annotated[float, Field(gt=0)] | None = Field(None, description="Instead of steps: passes over the training rows.")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="Norm that the gradient of an update is cut to, over all parameters and ranks; null is off."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer and its learning-rate schedule.")
    deepspeed: DeepSpeed = Field(default_factory=DeepSpeed, description="What the recipe decides about DeepSpeed.")
    nonfinite: NonFinite = Field(default_factory=NonFinite, description="What happens when a gradient is not finite.")


class Eval(Section):
    """When and how the sets of `data.eval` are evaluated."""

    before_training: bool = Field(True, description="Whether there is an evaluation before the first step.")
    every: NonNegative = Field(0, description="Steps between evaluations; 0 is never.")
    at_end: bool = Field(True, description="Whether there is an evaluation after the last step.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature in evaluation; 0 is greedy.")
    max_new_tokens: Count | None = Field(None, description="Longest completion in evaluation, in tokens; null: as in the rollout.")
    pass_k: tuple[Count, ...] = Field((1,), description="Values of k for pass@k, each at most the samples per prompt.")


class Checkpoint(Section):
    """When checkpoints are written and what stays of them."""

    every: NonNegative = Field(0, description="Steps between checkpoints; 0 writes only the last one.")
    keep: Count = Field(3, description="Newest checkpoints that stay on disk.")
    save_hf: bool = Field(True, description="Whether a checkpoint holds the policy in the form that `from_pretrained` loads.")


class Wandb(Section):
    """Where a Weights & Biases run is written."""

    project: Text = Field("rft", description="Project of the run.")
    entity: Text | None = Field(None, description="User or team; null takes the account's own.")
    group: Text | None = Field(None, description="Group of runs that this one belongs to.")
    name: Text | None = Field(None, description="Name of the run there; null takes the recipe's.")
    tags: tuple[Text, ...] = Field((), description="Tags of the run.")
    mode: Literal["online", "offline", "disabled"] = Field("online", description="Whether data is sent, kept on disk to be sent later, or dropped.")


class Track(Section):
    """Trackers beside the run's own event file."""

    tensorboard: bool | OutputPath | None = Field(
        None, description="true writes TensorBoard files into the run directory, a directory writes them there."
    )
    wandb: Wandb | None = Field(None, description="A mapping, which may be empty, switches Weights & Biases on; null is off.")


class Recipe(Section):
    """What a person wants, whole. `models.policy.path`, one data path, one reward and `train.steps` are enough."""

    name: Name | None = Field(None, description="Name of the run and of its directory; null takes the recipe file's.")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Key of everything random: order of the data, samples, dropout.")
    extends: tuple[Text, ...] = Field(
        (),
        description="Recipes this one builds on, left to right: mappings merge, lists replace, null removes; a path is relative to this file, "
        "a name without a file is a shipped recipe.",
    )
    models: Models = Field(description="The models of the run.")
    data: Data = Field(description="What the run trains on and is evaluated on.")
    rollout: Rollout = Field(default_factory=Rollout, description="How completions are sampled for training.")
    rewards: dict[Text, Reward] = Field(description="Label of a row to the weighted parts that score it; `default` serves rows without a label.")
    reward_shaping: RewardShaping = Field(default_factory=RewardShaping, description="What happens to rewards before the advantage.")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="The mathematics of the update.")
    batch: Batch = Field(default_factory=Batch, description="How the completions of a step are cut into updates.")
    train: Train = Field(default_factory=Train, description="How long and how fast the policy is trained.")
    eval: Eval = Field(default_factory=Eval, description="When and how the evaluation sets are evaluated.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="When checkpoints are written and what stays of them.")
    track: Track = Field(default_factory=Track, description="Trackers beside the run's own event file.")
