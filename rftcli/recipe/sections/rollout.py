"""`rollout`: how completions are sampled for training."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, NonNegative, Section, Share, Text


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
