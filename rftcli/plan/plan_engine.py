"""Record of a plan about its engine, where that is more than a module beside the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """Servers that the run starts on the first rank's machine."""

    servers: int
    gpus: tuple[int, ...]
    """Of all servers, in order; empty on a CPU."""
    command: tuple[str, ...]
    """Words in front of the arguments of `vllm serve`; empty: vLLM of the ranks' Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """vLLM servers on other devices than the ranks."""

    urls: tuple[str, ...]
    start: StartPlan | None
    weights: str
    """auto: nccl where both sides have GPUs, else files."""
    folder: str | None
    """For files; None: in the run directory."""
    timeout_seconds: float
    ready_seconds: float
    retries: int
    headers_env: Mapping[str, str]

    @property
    def count(self) -> int:
        return len(self.urls) if self.start is None else self.start.servers


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """An engine with a model of its own in every `tensor_parallel` consecutive ranks, or servers apart from them."""

    tensor_parallel: int
    max_model_tokens: int
    """Longest prompt and completion together."""
    max_sequences: int
    """Completions that one engine works on at a time; graphs are captured up to here."""
    memory_share: float | None
    """Of the device's memory, for the engine's weights, cache and working memory; None: the cache has a size of its own and nothing else is set."""
    cache_bytes: int | None
    """Of the key-value cache of one rank; None: what `memory_share` leaves."""
    sleep: int
    """What is given back while the policy is trained: 0 nothing, 1 the cache, with the weights in CPU memory, 2 both."""
    graphs: bool
    """Decode steps are captured as CUDA graphs."""
    seeds: str
    """request: every completion has a seed of its own. engine: the engine has one generator. auto: what costs nothing."""
    check_weights: bool
    """The engine's weights are compared with the trainer's after every update, not only after the first push."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's class."""
    memory: str = ""
    """How the memory was divided, in words."""
    cache_tokens: int | None = None
    """That `cache_bytes` hold; None: not known, or the engine is told in bytes."""
    weight_bytes: int | None = None
    """Of one rank's part of the engine's model; None: not known, or the engine need not be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPlan(EnginePlan):
    """vLLM, inside the ranks, beside them, or at servers apart from them."""

    process: str = "inside"
    """inside: in the ranks' process. beside: in one of its own on the same device. server: apart from the ranks."""
    server: ServerPlan | None = None
    lora: str = "merged"
    """merged into the weights, or adapter: by itself"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangPlan(EnginePlan):
    """SGLang, in processes beside the ranks that share their GPUs."""
