"""`rollout`: how completions are sampled for training."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, NonNegative, Options, Section, Share, Text
from rftcli.recipe.sections.sampling import Dynamic, Keep, LabelSampling, OverSample, Partial, Replay
from rftcli.recipe.sections.sglang import SglangEngine
from rftcli.recipe.sections.vllm import VllmEngine


class Penalties(Section):
    """Penalties on tokens that were there before; 1.0, 0.0 and 0.0 are off."""

    repetition: float = Field(
        1.0, gt=0, description="Divides positive scores, and multiplies negative ones, of tokens in the prompt or in the completion so far."
    )
    presence: float = Field(0.0, description="Subtracted once from the score of every token that the completion has so far.")
    frequency: float = Field(0.0, description="Subtracted from the score of a token as often as the completion has it so far.")


class Structured(Section):
    """The form that every completion is held to while it is sampled: one of the two."""

    regex: Text | None = Field(None, description="A regular expression that the whole completion matches.")
    json_schema: Options | None = Field(None, description="A JSON schema; the completion is one JSON value that it allows.")


class HfOptions(Section):
    """Further sampling options of the `hf` engine, with the names that transformers gives them."""

    typical_p: float = Field(1.0, gt=0, le=1, description="Locally typical sampling of this probability mass (2202.00666); 1.0 is off.")
    epsilon_cutoff: Share = Field(0.0, description="Leaves out tokens below this probability (2210.15191); 0.0 is off.")
    eta_cutoff: Share = Field(0.0, description="Leaves out tokens below a probability that falls with the entropy (2210.15191); 0.0 is off.")
    no_repeat_ngram_size: NonNegative = Field(0, description="No run of so many tokens comes twice in prompt and completion; 0 is off.")
    suppress_tokens: tuple[NonNegative, ...] = Field((), description="Token ids that are never sampled.")


class HfEngine(Section):
    """Settings of the `hf` engine."""

    batch_rows: Literal["auto"] | Count = Field("auto", description="Completions decoded together in one forward pass.")
    batch_tokens: Count | None = Field(
        None, description="Instead of `batch_rows`: so many rows that rows x (padded prompt + new tokens) stay within this number."
    )
    continuous: bool = Field(False, description="Whether a waiting completion takes the place of a finished one at once.")
    options: HfOptions = Field(default_factory=HfOptions, description="Further sampling options of the `hf` engine.")


class Rollout(Section):
    """How completions are sampled for training."""

    engine: Literal["auto", "hf", "fake", "vllm", "sglang"] = Field(
        "auto",
        description="Engine that samples; `auto` is vllm where it is installed and there is a GPU, else hf; `fake` needs no model and is for tests.",
    )
    samples_per_prompt: Count = Field(8, description="Completions of each prompt: the size of a group.")
    max_prompt_tokens: Count = Field(1024, description="Longest prompt in tokens.")
    max_new_tokens: Literal["auto"] | Count = Field(
        1024, description="Longest completion in tokens; `auto` is what the model's positions leave beside `max_prompt_tokens`."
    )
    min_new_tokens: NonNegative = Field(0, description="Shortest completion in tokens; no end token is sampled before.")
    temperature: float = Field(1.0, ge=0, description="What the logits are divided by before sampling; log-probs are taken at the same temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Samples from the smallest set of tokens that holds this probability mass; 1.0 is off.")
    top_k: NonNegative = Field(0, description="Samples from so many of the likeliest tokens; 0 is off.")
    min_p: Share = Field(0.0, description="Leaves out tokens below this share of the likeliest token's probability; 0.0 is off.")
    stop: tuple[Text, ...] = Field((), description="Strings that end a completion; they stay in its text.")
    stop_token_ids: tuple[NonNegative, ...] = Field((), description="Token ids that end a completion, beside the model's own end tokens.")
    ignore_eos: bool = Field(False, description="Whether sampling goes on after the model's end token.")
    penalties: Penalties = Field(default_factory=Penalties, description="Penalties on tokens that were there before.")
    logit_bias: dict[str, float] = Field(
        default_factory=dict, description="Added to the scores of tokens; a key of digits is a token id, any other a text that is one token."
    )
    bad_words: tuple[Text, ...] = Field((), description="Words whose tokens, one after another, are never sampled.")
    structured: Structured | None = Field(None, description="A form that every completion is held to.")
    first_token_temperature: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Temperature of the first token alone, usually far above the others' (FIRE); null is off."
    )
    by_label: dict[Text, LabelSampling] = Field(default_factory=dict, description="Label of a row to how its completions are sampled in training.")
    dynamic: Dynamic | None = Field(None, description="Replaces groups without signal by fresh prompts, within a step.")
    over_sample: OverSample | None = Field(None, description="Samples more prompts than a step needs and drops those with the longest answers.")
    partial: Partial | None = Field(None, description="Keeps unfinished answers for the next step, which goes on with them first.")
    max_version_lag: NonNegative = Field(
        0, description="Updates that a trained token may be older than the policy, with `partial`; 0: every token comes from the newest weights."
    )
    keep: Keep | None = Field(None, description="Trains on the best and worst completions of a prompt alone.")
    replay: Replay | None = Field(None, description="Brings prompts without signal back in later steps.")
    hf: HfEngine = Field(default_factory=HfEngine, description="Settings of the `hf` engine.")
    vllm: VllmEngine = Field(default_factory=VllmEngine, description="Settings of the `vllm` engine.")
    sglang: SglangEngine = Field(default_factory=SglangEngine, description="Settings of the `sglang` engine.")
