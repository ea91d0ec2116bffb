"""`rollout.sglang`: settings of the `sglang` engine."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Options
from rftcli.recipe.sections.engine import FastEngine


class SglangEngine(FastEngine):
    """Settings of the `sglang` engine; other engines do not read them."""

    seeds: Literal["auto", "request", "engine"] = Field(
        "auto",
        description="Whether every completion has a seed of its own, which needs SGLang's slower deterministic mode, or the engine's one generator "
        "is seeded when it starts; `auto` is the engine's.",
    )
    options: Options = Field(default_factory=dict, description="Further arguments of SGLang's `Engine(...)`.")
