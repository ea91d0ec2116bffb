"""What became of a group, small enough for all ranks to know: rewards, signal, where its prompt came from. Pure.

It is what refill, replay and curriculum decide by, so that they decide alike on every rank. Leaves out the decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftcli.errors import RftError
from rftcli.stages.records import has_spread
from rftcli.types import Group

REWARD = "reward"
"""The metric that is the sample's reward; any other is the name of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt that a slot of a step asks for."""

    draw: int
    """Identity of the group: key of its samples."""
    turn: int
    """Draw of the source that the prompt's row belongs to; another number than `draw` once prompts have come back."""
    returns: int = 0
    """How often the prompt has come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A sampled and scored group, in numbers."""

    ask: Ask
    slot: int
    source: str
    row: int
    row_id: str
    label: str
    rewards: tuple[float | None, ...]
    """By sample; a greedy twin is left out."""
    values: tuple[float | None, ...]
    """The metric of the curriculum, by sample."""
    tokens: int
    """Sampled tokens."""
    accepted: bool
    """Refill need not replace it."""

    @property
    def scored(self) -> list[float]:
        return [reward for reward in self.rewards if reward is not None]

    @property
    def flat(self) -> bool:
        """Scored, and all rewards alike: nothing to compare."""
        return len(self.scored) > 1 and not has_spread(self.scored)

    @property
    def mean(self) -> float | None:
        return sum(self.scored) / len(self.scored) if self.scored else None


def metric_of(group: Group, metric: str) -> tuple[float | None, ...]:
    """The metric of each sample, in order. None: the sample has no reward, or the part gave no value. Greedy twins are left out. RftError where the
    part gave values with names of their own, none of which is meant."""
    found: list[float | None] = []
    for sample in group.samples:
        if sample.completion.sample < 0:
            continue
        if sample.reward is None or metric == REWARD:
            found.append(sample.reward)
        else:
            values = {part.name: part.value for part in sample.parts}
            named = [name for name in values if name.startswith(f"{metric}.")]
            if metric not in values and named:
                raise RftError(f"the metric `{metric}` is a part that returns named values", hint=f"name one of them: {', '.join(named)}")
            found.append(values.get(metric))
    return tuple(found)


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
