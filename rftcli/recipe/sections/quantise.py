"""Weights in few bits, of the policy and of scorers."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Section


class Quantise(Section):
    """Frozen weights in few bits, through bitsandbytes; of the policy with LoRA only."""

    bits: Literal[4, 8] = Field(4, description="Bits of a weight.")
    kind: Literal["nf4", "fp4"] = Field("nf4", description="Number type of 4-bit weights.")
    nested: bool = Field(False, description="Whether the scales of 4-bit weights are quantised once more.")
