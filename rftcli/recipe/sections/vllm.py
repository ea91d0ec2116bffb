"""`rollout.vllm`: settings of the `vllm` engine."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, Options, Section

PositiveShare = Annotated[float, Field(gt=0, lt=1)]


class VllmEngine(Section):
    """Settings of the `vllm` engine; other engines do not read them."""

    tensor_parallel: Count = Field(1, description="GPUs that share one engine: so many consecutive ranks sample together.")
    memory_share: Literal["auto"] | PositiveShare = Field(
        "auto",
        description="Share of each GPU's memory for the engine's weights, cache and working memory; `auto` is what it can use beside the training.",
    )
    process: Literal["auto", "inside"] = Field("auto", description="Where the engine runs: inside the training ranks.")
    max_model_tokens: Literal["auto"] | Count = Field(
        "auto", description="Longest prompt and completion together; `auto` is what the lengths of rollout and evaluation ask for."
    )
    max_sequences: Literal["auto"] | Count = Field(
        "auto", description="Completions that one engine works on at a time; `auto` is its share of a step, up to what pays."
    )
    sleep: Literal["auto", 0, 1, 2] = Field(
        "auto",
        description="What the engine gives back while the policy is trained: 0 nothing, 1 its cache, with the weights in CPU memory, 2 both; "
        "`auto` is 0 wherever everything fits.",
    )
    seeds: Literal["auto", "request", "engine"] = Field(
        "auto",
        description="Whether every completion has a seed of its own, or the engine's one generator is seeded for each rollout; `auto` takes seeds of "
        "their own where they cost nothing.",
    )
    lora: Literal["merged"] = Field("merged", description="How an adapter reaches the engine: merged into the weights.")
    check_weights: bool = Field(False, description="Whether the engine's weights are compared with the trainer's, bit for bit, after every update.")
    options: Options = Field(default_factory=dict, description="Further arguments of vLLM's `LLM(...)`.")
