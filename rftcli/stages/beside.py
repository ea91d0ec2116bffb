"""What takes part in the updates of a step beside the policy and its own loss. A plain record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rftcli.stages.supervised import SupervisedStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The default is nothing: the policy learns alone, with the plan's coefficients."""

    critic: Any | None = None
    supervised: SupervisedStream | None = None
    kl_coefficient: float | None = None
    """In force in this step, wherever the KL term is; None: the plan's."""
    policy_learns: bool = True
    """False: only the critic is updated."""


ALONE = Beside()
