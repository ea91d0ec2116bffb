"""`eval`, `checkpoint`, `track`: what happens beside the updates."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, NonNegative, OutputPath, Section, Target, Text


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
    upload_samples: int = Field(16, ge=0, le=1000, description="Completions in the table of a step; 0 sends none.")


class Track(Section):
    """Trackers beside the run's own event file."""

    tensorboard: bool | OutputPath | None = Field(
        None, description="true writes TensorBoard files into the run directory, a directory writes them there."
    )
    wandb: Wandb | None = Field(None, description="A mapping, which may be empty, switches Weights & Biases on; null is off.")
    python: Target | None = Field(None, description="`module:Class` of an observer of your own beside the recipe: it sees every event.")
