"""Settings that the fast engines share: `rollout.vllm` and `rollout.sglang`."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, Section

PositiveShare = Annotated[float, Field(gt=0, lt=1)]


class FastEngine(Section):
    """Settings of an engine with a model of its own; other engines do not read them."""

    tensor_parallel: Count = Field(1, description="GPUs that share one engine: so many consecutive ranks sample together.")
    memory_share: Literal["auto"] | PositiveShare = Field(
        "auto",
        description="Share of each GPU's memory for the engine's weights, cache and working memory; `auto` is what it can use beside the training.",
    )
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
    check_weights: bool = Field(False, description="Whether the engine's weights are compared with the trainer's, bit for bit, after every update.")
