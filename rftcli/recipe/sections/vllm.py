"""`rollout.vllm`: settings of the `vllm` engine."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Options
from rftcli.recipe.sections.engine import FastEngine


class VllmEngine(FastEngine):
    """Settings of the `vllm` engine; other engines do not read them."""

    process: Literal["auto", "inside"] = Field("auto", description="Where the engine runs: inside the training ranks.")
    seeds: Literal["auto", "request", "engine"] = Field(
        "auto",
        description="Whether every completion has a seed of its own, or the engine's one generator is seeded for each rollout; `auto` takes seeds of "
        "their own where they cost nothing.",
    )
    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="How an adapter reaches the engine: merged into the weights, or by itself, so that little is pushed and every token costs more.",
    )
    options: Options = Field(default_factory=dict, description="Further arguments of vLLM's `LLM(...)`.")
