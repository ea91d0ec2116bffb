"""The part of a plan that shapes rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingPlan:
    """What happens to a training reward between its parts and the advantage, in the order of the fields. Evaluation is never shaped."""

    truncated: str = "keep"
    """keep, mask or penalise"""
    truncated_factor: float = 0.0
    """penalise: what a truncated answer's reward above 0 is multiplied with"""
    missing_eos_penalty: float = 0.0
    """Subtracted from the reward of an answer that did not end by itself."""
    overlong_buffer: int | None = None
    """Tokens before the limit over which the penalty for length grows; None is off."""
    overlong_factor: float = 1.0
    max_new_tokens: int = 0
    """The limit that is meant."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Label -> its own limit, where it has one."""
    running_norm: str = "off"
    """off, scale or full"""
    clip: tuple[float, float] | None = None

    @property
    def active(self) -> bool:
        penalties = self.truncated != "keep" or self.missing_eos_penalty > 0 or self.overlong_buffer is not None
        return penalties or self.running_norm != "off" or self.clip is not None
