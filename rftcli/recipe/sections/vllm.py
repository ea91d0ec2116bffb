"""`rollout.vllm`: settings of the `vllm` engine."""

from typing import Literal

from pydantic import Field

from rftcli.recipe.sections.base import Count, NonNegative, Options, OutputPath, Section, Text
from rftcli.recipe.sections.engine import FastEngine
from rftcli.recipe.sections.teacher import Url


class VllmStart(Section):
    """Servers that the run starts on the first rank's machine, and ends with itself."""

    servers: Count = Field(1, description="How many; each has `tensor_parallel` GPUs of its own.")
    gpus: tuple[NonNegative, ...] = Field(
        (), description="Numbers of the GPUs, `servers` x `tensor_parallel` of them, none of them a training rank's; empty on a CPU."
    )
    command: tuple[Text, ...] = Field(
        (), description="Words that start `vllm serve`, such as `[/other/venv/bin/vllm, serve]`; empty: vLLM of this Python. Arguments are added."
    )


class VllmServer(Section):
    """vLLM servers that sample instead of engines on the training ranks: those at `urls`, or those of `start`."""

    urls: tuple[Url, ...] = Field((), description="Addresses such as `http://host:8000`; groups are dealt over them.")
    start: VllmStart | None = Field(None, description="Servers that the run starts and ends itself.")
    weights: Literal["auto", "nccl", "files"] = Field(
        "auto",
        description="How new weights reach them. nccl: broadcast over a process group of its own (gloo on CPUs). files: a folder that both see. "
        "auto: nccl where both sides have GPUs.",
    )
    folder: OutputPath | None = Field(
        None, description="Where `files` lie until they are loaded, on a file system that the servers see; null is the run directory."
    )
    timeout_seconds: float = Field(
        600.0, gt=0, description="How long a server may finish nothing while it is waited for, or take for new weights; then the run stops."
    )
    ready_seconds: float = Field(600.0, gt=0, description="How long a server may take until it is healthy, at the start of the run.")
    retries: NonNegative = Field(
        2, description="How often a completion is asked for again after a broken connection or status 429, 502, 503 or 504."
    )
    headers_env: dict[Text, Text] = Field({}, description="Header of requests -> environment variable that holds its value, on the ranks.")


class VllmEngine(FastEngine):
    """Settings of the `vllm` engine; other engines do not read them."""

    process: Literal["auto", "inside", "beside"] = Field(
        "auto",
        description="Where the engine runs: inside the training ranks, or in a process beside them on the same device; `auto` is inside.",
    )
    server: VllmServer | None = Field(None, description="Servers that sample on other GPUs or machines, instead of engines on the training ranks.")
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
