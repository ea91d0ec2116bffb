"""What a plan says about its scorers (`models.scorers`), as plain data that goes through JSON both ways.

Leaves out how each kind scores: services in `service`, `http` and `judge`, models in `models.classifier` and `runtime.scorers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLASSIFIER, GENERATIVE, HTTP, PYTHON = "classifier", "generative", "http", "python"
KINDS = (CLASSIFIER, GENERATIVE, HTTP, PYTHON)
PRESETS = ("lightrft", "openrlhf")
APIS = ("chat", "completions")
OVERLONG = ("refuse", "cut_left")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSpec:
    """A checkpoint on the rank. Scorers of one kind whose `path`, `revision` and number types are the same share one copy."""

    path: str
    """A directory or a hub id: `builtin:` names are resolved."""
    given: str
    """As the recipe writes it."""
    revision: str | None
    """Commit of a hub id; None for files on this machine."""
    dtype: str
    trust_remote_code: bool
    quantise: Mapping[str, Any] | None
    """{"bits", "kind", "nested"}, or None for weights in `dtype`."""
    options: Mapping[str, Any]
    """Further arguments of `from_pretrained`."""
    parameters: int | None
    tokenizer: str | None
    """Path of another tokenizer than the checkpoint's own."""
    template: str | None
    """Chat template as Jinja text; None: the tokenizer's own, if it has one."""
    max_tokens: int | None
    """Longest text in tokens; None: the model's positions."""
    overlong: str
    """refuse: a longer text is an error of its sample. cut_left: its beginning is cut, and counted."""
    batch_tokens: int
    """Tokens of one forward pass, padding included."""
    offload: bool
    """It waits in CPU memory between uses."""
    sharded: bool
    """Its weights are partitioned over the ranks (ZeRO-3), and gathered layer by layer."""
    engine: str = "hf"
    """generative: hf, or vllm in a process beside each rank."""
    beside_gib: float = 0.0
    """What its engine holds on the device beside the weights: cache, context, working memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    """How a judge's reply becomes a number: exactly one of `regex`, `json` and `token` is set."""

    regex: str | None = None
    """A pattern with one group; the last match counts."""
    json: str | None = None
    """Dotted name of a field of the last JSON object of the reply."""
    token: str | None = None
    """The score is this word's probability as the first token of the reply."""
    against: tuple[str, ...] = ()
    """Words that `token` shares the probability with, which then sums to 1; empty: the probability among all tokens."""
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """How servers are reached."""

    urls: tuple[str, ...]
    timeout_seconds: float
    """Of one try, from its start to the last byte of the reply."""
    retries: int
    concurrency: int
    """Requests of one rank at a time."""
    per_minute: float | None
    """Requests of all ranks together; None: no limit."""
    headers_env: Mapping[str, str]
    """Header -> name of the environment variable that holds its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSpec:
    """vLLM servers that the run starts for a judge, and ends with itself. Judges whose `StartSpec` is the same share them."""

    path: str
    """A directory or a hub id: `builtin:` names are resolved."""
    given: str
    """As the recipe writes it."""
    revision: str | None
    dtype: str
    trust_remote_code: bool
    tokenizer: str | None
    """Path of another tokenizer than the checkpoint's own."""
    template: str | None
    """Chat template as Jinja text; None: the tokenizer's own."""
    parameters: int | None
    max_model_tokens: int | None
    """Longest question and reply together; None: the model's positions."""
    servers: int
    tensor_parallel: int
    """GPUs of each server."""
    gpus: tuple[int, ...]
    """Of all servers, in order, on the first rank's machine; empty on a CPU."""
    memory_share: float | None
    """Of each GPU's memory for weights and cache."""
    cache_bytes: int | None
    """Of the key-value cache of one server on a CPU."""
    ready_seconds: float
    command: tuple[str, ...]
    """Words in front of the arguments of `vllm serve`; empty: vLLM of the ranks' Python."""
    options: Mapping[str, Any]
    """Further arguments of `vllm serve`."""
    beside: bool = False
    """Every rank has one for itself, on its own device."""
    sleeps: bool = False
    """It waits in CPU memory between uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """One entry of `models.scorers` that a reward part uses."""

    name: str
    kind: str
    cache: bool
    weights: WeightsSpec | None = None
    service: ServiceSpec | None = None
    start: StartSpec | None = None
    """generative: of the servers at which it is asked, whose addresses `service` has when they have been started."""
    head: str = "0"
    """classifier: a number, or an expression of heads such as `0.5*h[0] - h[2]`."""
    prompt: str | None = None
    """generative: Jinja text."""
    read: ReadSpec | None = None
    max_new_tokens: int = 0
    temperature: float = 0.0
    samples: int = 1
    """generative: replies whose mean is the score."""
    seed: int = 0
    model: str | None = None
    """generative: what a server calls its model; None: the run has not started it yet."""
    api: str = "chat"
    preset: str | None = None
    score_field: str = "rewards"
    batch_size: int = 1
    """http: rows of one request."""
    target: str | None = None
    """python: `module:Class`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_gib: float = 0.0
    """python: what the module holds on the rank's device."""

    @property
    def remote(self) -> bool:
        """Does a service score, while the engine still generates?"""
        return self.service is not None and self.weights is None
