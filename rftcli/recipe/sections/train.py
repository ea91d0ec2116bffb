"""`batch` and `train`: how completions become updates, and for how long."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, NonNegative, Options, Section, Share, Text
from rftcli.recipe.sections.run import EarlyStop
from rftcli.recipe.sections.supervised import Supervised


class Batch(Section):
    """How the completions of a step are cut into updates; global over ranks unless a name says micro."""

    prompts_per_step: Count = Field(64, description="Prompts of one step, over all ranks.")
    updates_per_step: Count = Field(1, description="Mini-batches that the step's completions are cut into, by whole groups.")
    epochs: Count = Field(1, description="How often the step's mini-batches are gone over.")
    rollouts_per_update: Count = Field(
        1, description="Rollouts that the step's prompts are generated in, one after another with the same weights, before the update."
    )
    micro_batch_size: Literal["auto"] | Count = Field("auto", description="Completions of one pass of one rank, instead of a token budget.")
    tokens_per_micro_batch: Literal["auto"] | Count = Field(
        "auto", description="Tokens of one pass of one rank, padding included; a completion that is longer goes alone."
    )
    layout: Literal["auto", "padded", "packed"] = Field(
        "auto",
        description="Whether the completions of a micro-batch lie in padded rows or one after another in a single row; `auto` packs where "
        "attention does.",
    )
    share_prompts: Literal["auto"] | bool = Field(
        "auto", description="Whether a group's prompt goes through the model once in a micro-batch; `auto`: where it saves enough tokens."
    )
    balance: Literal["auto"] | bool = Field(
        "auto",
        description="Whether completions are shared out to ranks by their work before they pass through a model; `auto`: where micro-batches are "
        "cut by tokens.",
    )
    skip_zero_advantage: Literal["auto"] | bool = Field(
        "auto",
        description="Whether completions whose advantage is 0 are left out of the update's passes, which changes no gradient; `auto`: where the loss "
        "has no other term for them.",
    )


class Optimizer(Section):
    """The optimizer and its learning-rate schedule."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = Field(
        "adamw", description="Optimizer; `adamw_8bit` keeps its moments in 8 bits (CUDA), `muon` orthogonalises the updates of hidden matrices."
    )
    lr: float = Field(1.0e-6, gt=0, le=1, description="Peak learning rate.")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="Decay of the running means of gradient and squared gradient.")
    eps: float = Field(1.0e-8, gt=0, description="What is added to the root of the squared gradient's mean.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay per update, times the learning rate.")
    no_decay: tuple[Text, ...] = Field((), description="Patterns of parameter names without weight decay, such as `*bias` and `*norm*`.")
    options: Options = Field(default_factory=dict, description="Further arguments of the optimizer, by their names there.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="How the learning rate goes on after the warm-up.")
    warmup_steps: NonNegative = Field(0, description="Steps over which the learning rate rises from 0 to `lr`.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the schedule.")
    schedule_steps: Count | None = Field(
        None, description="Steps until the schedule's end, which stays when a run is made longer; null: the run's own."
    )


class DeepSpeed(Section):
    """What the recipe decides about DeepSpeed; the plan derives the rest."""

    zero_stage: Literal["auto", 0, 1, 2, 3] = Field("auto", description="What is sharded over ranks: nothing, optimizer, gradients, parameters too.")
    extra: Options = Field(default_factory=dict, description="Merged into DeepSpeed's configuration; what the plan derives is refused here.")


class Precision(Section):
    """Number types of a policy in bfloat16; one in float32 has no other."""

    master: Literal["float32", "bfloat16"] = Field("float32", description="Weights and moments that the optimizer works on.")
    gradients: Literal["float32", "bfloat16"] = Field("float32", description="Gradients while micro-batches add to them.")
    reduce: Literal["float32", "bfloat16"] = Field("float32", description="Gradients on their way between ranks.")


class Offload(Section):
    """What lies in the memory of the machine instead of that of the GPU."""

    optimizer: Literal["none", "cpu"] = Field("none", description="Master weights and moments; the optimizer's step then runs on the CPU.")
    parameters: Literal["none", "cpu"] = Field("none", description="Parameters between their uses, under ZeRO stage 3.")


class NonFinite(Section):
    """What happens when a gradient is not finite."""

    skip_at_most: NonNegative = Field(
        3, description="Updates in a row that may be skipped because a gradient was not finite; one more stops the run."
    )


class Train(Section):
    """How long and how fast the policy is trained; one of `steps` and `data_passes` is needed."""

    steps: Count | None = Field(None, description="Steps of the run: one rollout and its updates each.")
    data_passes: Annotated[float, Field(gt=0)] | None = Field(None, description="Instead of steps: passes over the training rows.")
    max_hours: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Hours that one attempt may take, start-up included: the run stops with a checkpoint before (exit 75); null is no limit."
    )
    max_tokens: Count | None = Field(
        None, description="Tokens of prompts and completions, over all steps and ranks, after which the run ends (exit 0); null is no limit."
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="Norm that the gradient of an update is cut to, over all parameters and ranks; null is off."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer and its learning-rate schedule.")
    precision: Precision = Field(default_factory=Precision, description="Number types of the update.")
    offload: Offload = Field(default_factory=Offload, description="What lies in the memory of the machine.")
    compile: bool = Field(False, description="Whether the model's layers are compiled for the update (torch.compile); not under ZeRO stage 3.")
    kernels: Literal["auto", "none", "liger"] = Field(
        "auto",
        description="Fused kernels of the package liger-kernel for norms, gated layers and rotary embedding, on a GPU; auto: where it is installed.",
    )
    deterministic: bool = Field(False, description="Whether only kernels with repeatable results run: slower on a GPU.")
    deepspeed: DeepSpeed = Field(default_factory=DeepSpeed, description="What the recipe decides about DeepSpeed.")
    freeze_policy_steps: NonNegative = Field(0, description="Steps at the start in which only the critic learns.")
    supervised: Supervised | None = Field(None, description="Known answers that are learned beside the rewarded ones; null is off.")
    nonfinite: NonFinite = Field(default_factory=NonFinite, description="What happens when a gradient is not finite.")
    early_stop: EarlyStop | None = Field(None, description="When the run ends because it does not get better; null is never.")
