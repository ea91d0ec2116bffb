"""What takes part in the updates of a step beside the policy and its own loss. A plain record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rftcli.stages.supervised import SupervisedStream


class EntropyBonus(Protocol):
    """The coefficient of the entropy bonus, which may follow the entropy from update to update."""

    @property
    def coefficient(self) -> float:
        """Of the next update."""

    def after(self, entropy: float) -> None:
        """An update of this mean entropy was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The default is nothing: the policy learns alone, with the plan's coefficients."""

    critic: Any | None = None
    supervised: SupervisedStream | None = None
    kl_coefficient: float | None = None
    """In force in this step, wherever the KL term is; None: the plan's."""
    entropy: EntropyBonus | None = None
    own_loss: Callable[..., Any] | None = None
    """The loss of the kind `python`, ready to be called as those of the table."""
    policy_learns: bool = True
    """False: only the critic is updated."""


ALONE = Beside()
