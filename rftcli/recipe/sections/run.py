"""`eval`, `checkpoint`, `track`: what happens beside the updates."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, NonNegative, OutputPath, Section, Target, Text
from rftcli.recipe.sections.rewards import Reward


class Eval(Section):
    """When and how the sets of `data.eval` are evaluated."""

    before_training: bool = Field(True, description="Whether there is an evaluation before the first step.")
    every: NonNegative | Literal["pass"] = Field(
        0, description="Steps between evaluations; 0 is never, `pass` is once for every pass over the training rows."
    )
    at_end: bool = Field(True, description="Whether there is an evaluation after the last step.")
    rewards: dict[Text, Reward] | None = Field(
        None, description="Entries of the same form as `rewards` that take the place of that whole table in evaluation; null: those of training."
    )
    temperature: float = Field(0.0, ge=0, description="Sampling temperature in evaluation; 0 is greedy.")
    max_new_tokens: Count | None = Field(None, description="Longest completion in evaluation, in tokens; null: as in the rollout.")
    pass_k: tuple[Count, ...] = Field((1,), description="Values of k for pass@k, each at most the samples per prompt.")
    vote_k: tuple[Count, ...] = Field(
        (), description="Values of k for maj@k, the score of the most frequent answer of k, each at most the samples per prompt."
    )
    weights: Literal["live", "ema"] = Field("live", description="Weights that are evaluated: those of the last update, or their running mean.")


class EarlyStop(Section):
    """When a run ends before its last step because it does not get better."""

    metric: Text = Field(
        description="What has to get better: `eval.NAME.mean@1`, or another metric of an evaluation set, or a metric of the step event such as "
        "`reward_mean` or `response_tokens.mean`."
    )
    patience: Count = Field(3, description="Evaluations, or steps for a metric of steps, in a row without a better value before the run ends.")
    mode: Literal["max", "min"] = Field("max", description="Whether larger or smaller values are better.")
    min_delta: float = Field(0.0, ge=0, description="By how much a value has to be better than the best one so far.")


class Samples(Section):
    """What of the training completions stays on disk."""

    every: Count = Field(1, description="Steps between files of completions; the first step always has one.")
    max: Count | None = Field(None, description="Completions written per step, whole groups of the smallest draws first; null writes all.")


class KeepBest(Section):
    """Checkpoints that stay because an evaluation was best there."""

    metric: Text = Field(description="`eval.<set>.<metric>` of an evaluation at the checkpoint's step, such as `eval.gsm8k.mean@1`.")
    mode: Literal["max", "min"] = Field("max", description="Whether more or less is better.")
    keep: Count = Field(1, description="How many of the best stay, beside the newest.")


class Checkpoint(Section):
    """When checkpoints are written and what stays of them."""

    every: NonNegative = Field(0, description="Steps between checkpoints; 0 writes only the last one.")
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Minutes after which the next step writes a checkpoint, counted from the last one; null is never."
    )
    before_deadline: bool = Field(
        False, description="Whether the run stops with a checkpoint in time before `SLURM_JOB_END_TIME` or `RFT_DEADLINE` (seconds since the epoch)."
    )
    deadline_margin_seconds: float = Field(
        60.0, ge=0, description="Seconds left at the deadline, beside the measured time of one more step and its checkpoint."
    )
    keep: Count = Field(3, description="Newest checkpoints that stay on disk.")
    keep_best: KeepBest | None = Field(None, description="Checkpoints that stay because an evaluation was best there; null is none.")
    max_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Size of all checkpoints above which the oldest go; the newest and the best stay whatever their size."
    )
    background: Literal["auto"] | bool = Field(
        "auto", description="Whether a checkpoint is copied and written while the next steps run; `auto` where host memory holds the copy."
    )
    trainer_state: bool = Field(True, description="Whether a checkpoint holds the optimizer; without it a run cannot go on as it was.")
    save_hf: bool = Field(True, description="Whether a checkpoint holds the policy in the form that `from_pretrained` loads.")


class Wandb(Section):
    """Where a Weights & Biases run is written."""

    project: Text = Field("rft", description="Project of the run.")
    entity: Text | None = Field(None, description="User or team; null takes the account's own.")
    group: Text | None = Field(None, description="Group of runs that this one belongs to.")
    name: Text | None = Field(None, description="Name of the run there; null takes the recipe's.")
    tags: tuple[Text, ...] = Field((), description="Tags of the run.")
    mode: Literal["online", "offline", "disabled"] = Field("online", description="Whether data is sent, kept on disk to be sent later, or dropped.")
    upload_samples: int = Field(16, ge=0, le=1000, description="Completions in the table of a step; 0 sends none.")


class Track(Section):
    """Trackers beside the run's own event file."""

    tensorboard: bool | OutputPath | None = Field(
        None, description="true writes TensorBoard files into the run directory, a directory writes them there."
    )
    wandb: Wandb | None = Field(None, description="A mapping, which may be empty, switches Weights & Biases on; null is off.")
    python: Target | None = Field(None, description="`module:Class` of an observer of your own beside the recipe: it sees every event.")
