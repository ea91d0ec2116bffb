"""Records of a plan about memory: what is expected to be held, part by part and stage by stage, of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STAGES = ("rollout", "score", "credit", "learn")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    name: str
    gib: Mapping[str, float]
    """By stage; a stage that holds none of it is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    rows: tuple[MemoryRow, ...]
    """On the training device."""
    device_gib: float
    """Of the device, or of a rank's part of the machine's memory."""
    usable_gib: float
    host: tuple[MemoryRow, ...] = ()
    """In the host's memory, of one rank, beside a GPU."""

    def total_gib(self, stage: str) -> float:
        return sum(row.gib.get(stage, 0.0) for row in self.rows)

    @property
    def peak(self) -> tuple[str, float]:
        """The fullest stage and its GiB."""
        return max(((stage, self.total_gib(stage)) for stage in STAGES), key=lambda item: item[1])

    @property
    def fits(self) -> bool:
        return self.peak[1] <= self.usable_gib
