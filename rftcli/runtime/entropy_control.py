"""The coefficient of the entropy bonus from update to update. It remembers, so with a controller it is part of every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftcli.algo.entropy import next_coefficient
from rftcli.plan.plan import LossPlan


class EntropyControl:
    """Starts at the plan's coefficient; `after` each applied update its controller says the next one.

    With a controller the bonus is applied only while the entropy of the last update is at most the target; before the first update it is.
    """

    def __init__(self, plan: LossPlan) -> None:
        self._plan = plan.entropy_controller
        self._coefficient = plan.entropy_coefficient
        self._entropy: float | None = None

    @property
    def coefficient(self) -> float:
        """To be applied in the next update."""
        above = self._plan is not None and self._entropy is not None and self._entropy > self._plan.target
        return 0.0 if above else self._coefficient

    def after(self, entropy: float) -> None:
        """`entropy` of an applied update, mean over its trained tokens."""
        if self._plan is None:
            return
        plan = self._plan
        self._coefficient = next_coefficient(self._coefficient, entropy, target=plan.target, delta=plan.delta, low=plan.min, high=plan.max)
        self._entropy = entropy

    def state_dict(self) -> Mapping[str, Any]:
        return {"coefficient": self._coefficient, "entropy": self._entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._coefficient = float(state["coefficient"])
        self._entropy = None if state["entropy"] is None else float(state["entropy"])
