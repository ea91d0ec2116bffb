"""The coefficient of the KL term from step to step. It remembers, so it is part of every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftcli.algo.kl import CONTROLLERS
from rftcli.plan.plan import KlPlan


class KlControl:
    """Starts at the plan's coefficient; `after` a step in which the policy learned, its controller says the next one."""

    def __init__(self, plan: KlPlan) -> None:
        self.coefficient = plan.coefficient
        self._plan = plan
        self._controller = CONTROLLERS[plan.controller]

    def after(self, kl: float, completions: int) -> None:
        """`kl` as applied: token mean, or mean of sequence sums; `completions` of the step, all ranks."""
        known = {"target": self._plan.target, "horizon": self._plan.horizon, "completions": completions}
        self.coefficient = self._controller.function(self.coefficient, kl, **{name: known[name] for name in self._controller.options})

    def state_dict(self) -> Mapping[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coefficient = float(state["coefficient"])
