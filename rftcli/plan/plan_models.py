"""Records of a plan about its models beside the model itself: adapter, few bits, running mean, how the reference is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPlan:
    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    """Name endings; ("all-linear",): all linear layers but the head. One that is no list in the recipe is a regular expression, `pattern`."""
    pattern: bool
    save_also: tuple[str, ...]
    start_from: str | None
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisePlan:
    bits: int
    kind: str
    nested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaPlan:
    decay: float
    evaluate: bool
    export: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePlan:
    """How the reference is held, beside which model it is."""

    kind: str
    """model: a frozen model of its own. adapter_off: the policy without its adapter. adapter_copy: the policy under a frozen copy of the adapter
    it started from."""
    refresh_every: int
    """Steps; 0: never."""
    mix: float
    offload: bool
    shard: bool = False
    """Every rank holds a part of each weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """A teacher behind a server."""

    url: str
    api: str
    """vllm, echo or sglang"""
    model: str | None
    """Name at the server; None: the first one that it lists."""
    timeout_seconds: float
    retries: int
    concurrency: int
    """Requests of one rank at a time."""
    headers_env: Mapping[str, str]
    """Header -> environment variable that holds its value."""
