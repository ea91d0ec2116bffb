"""Prompts whose group had no signal come back some steps later, when the policy is another one. Pure; remembers, as part of a checkpoint.

What comes back is a prompt and not its old answers: it is sampled anew, as a group of its own. Bounded three ways: how often one prompt comes back,
how many wait, and which share they may have of the prompts that are asked for. Where a step goes on with kept answers it asks for fewer prompts than
it trains on; since every trained prompt was asked for once, over the steps the share of what is asked for is the share of what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftcli.errors import ResumeError
from rftcli.plan.plan_sampling import ReplayPlan
from rftcli.stages.outcomes import Outcome

ROUNDING = 1e-9
"""Added shares of a whole prompt are one, whatever the rounding of their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    turn: int
    """Draw of the source that the prompt came from."""
    due: int
    """The first step that it may come back in."""
    returns: int
    """How often it will then have come back."""


class Replay:
    """`protocols.Stateful`. The same on every rank: it is told the same and asked the same."""

    def __init__(self, plan: ReplayPlan, *, data: str = "") -> None:
        """`data`: fingerprint of the rows that turns are counted in."""
        self.returned = 0
        """Prompts that came back, over the whole run."""
        self.waiting: list[Waiting] = []
        """First come, first out."""
        self._left = 0.0
        """What earlier steps had of the share beyond whole prompts, 0 to 1: a share of 0.25 of 2 places is a prompt in every other step."""
        self._plan, self._data = plan, data
        self._dropped = 0

    def take(self, step: int, places: int) -> list[Waiting]:
        """Prompts that come back in `step`, the longest waiting first: at most the plan's share of the `places` that are asked for, and of what
        earlier steps had left over."""
        allowed = self._left + self._plan.share * places
        most = min(places, int(allowed + ROUNDING))
        self._left = min(1.0, max(0.0, allowed - most))
        due = [item for item in self.waiting if item.due <= step][:most]
        self.waiting = [item for item in self.waiting if item not in due]
        return due

    def after(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Remember the prompts without signal. A group that could not be scored says nothing about its prompt and is left out."""
        for outcome in outcomes:
            below = self._plan.below
            if not outcome.flat or (below is not None and outcome.mean is not None and outcome.mean >= below):
                continue
            if outcome.ask.returns >= self._plan.times or len(self.waiting) >= self._plan.max_waiting:
                self._dropped += 1
                continue
            self.waiting.append(Waiting(turn=outcome.ask.turn, due=step + self._plan.after_steps, returns=outcome.ask.returns + 1))

    def metrics(self) -> Mapping[str, float]:
        """`waiting` now; `given_up` over the run: without signal once too often, or no room to wait."""
        return {"waiting": len(self.waiting), "given_up": self._dropped}

    def state_dict(self) -> Mapping[str, Any]:
        waiting = [[item.turn, item.due, item.returns] for item in self.waiting]
        return {"data": self._data, "returned": self.returned, "given_up": self._dropped, "left": self._left, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ResumeError if the turns were counted in other data."""
        if state["data"] != self._data:
            raise ResumeError("the prompts that wait belong to other rows", hint="let them go: `rft resume RUN_DIR --accept`")
        self.returned, self._dropped, self._left = int(state["returned"]), int(state["given_up"]), float(state["left"])
        self.waiting = [Waiting(turn=int(turn), due=int(due), returns=int(returns)) for turn, due, returns in state["waiting"]]
