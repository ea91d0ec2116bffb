"""What servers of models that the run starts have in common: a judge's and a teacher's."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Options, Section, Text
from rftcli.recipe.sections.engine import PositiveShare


class StartedServer(Section):
    """How a vLLM server is started that the run ends with itself."""

    memory_share: Literal["auto"] | PositiveShare = Field(
        "auto", description="Share of each GPU's memory for weights and cache; on a CPU of the machine's memory for the cache alone."
    )
    ready_seconds: float = Field(600.0, gt=0, description="How long the server may take until it is healthy, at the start of the run.")
    command: tuple[Text, ...] = Field(
        (), description="Words that start `vllm serve`, such as `[/other/venv/bin/vllm, serve]`; empty: vLLM of this Python. Arguments are added."
    )
    options: Options = Field(default_factory=dict, description="Further arguments of `vllm serve`, such as `{quantization: awq}`.")
