"""Records of a plan about what happens beside the updates: checkpoints, trackers, launching, profiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBestPlan:
    set: str
    metric: str
    """Of the set's evaluation: mean@1, pass@4, ..."""
    highest: bool
    """Is more better?"""
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    every: int
    every_minutes: float | None
    before_deadline: bool
    deadline_margin_seconds: float
    keep: int
    keep_best: KeepBestPlan | None
    max_gib: float | None
    trainer_state: bool
    save_hf: bool
    background: bool = False
    """What it holds is copied to host memory, and written while the next steps run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackPlan:
    tensorboard: str | None
    wandb: Mapping[str, Any] | None
    python: Mapping[str, Any] | None = None
    """`target` of the user's own observer, and the `folder` it is imported from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_minutes: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    steps: tuple[int, ...] = ()
    tool: str = "torch"
    ranks: str = "first"
    """first or all"""
