"""The facts on a policy's model card: where it comes from, how far it got, what it scores. Part of every checkpoint, so that a resumed run knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rftcli import __version__
from rftcli.observe.numbers import means_with_intervals, number
from rftcli.observe.text import interval, short
from rftcli.plan.plan import Plan


@dataclass(slots=True, kw_only=True)
class Latest:
    """The newest numbers of a run."""

    step: int = 0
    reward: float | None = None
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Set -> metric -> {value, low, high}, and the step of it."""

    def see_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.step, self.reward = step, number(metrics.get("reward_mean"))

    def see_eval(self, step: int, sets: Mapping[str, Mapping[str, Any]]) -> None:
        for name, metrics in sets.items():
            self.evals[name] = {"step": step, "metrics": {metric: list(values) for metric, values in means_with_intervals(metrics).items()}}

    def state_dict(self) -> Mapping[str, Any]:
        return {"step": self.step, "reward": self.reward, "evals": self.evals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.reward, self.evals = int(state["step"]), state["reward"], dict(state["evals"])


def card(plan: Plan, latest: Latest) -> dict[str, str]:
    """Rows of the card, for `models.export`. Nothing that differs between two runs of the same plan: no time, no path of this machine."""
    rows = {
        "base model": plan.policy.given,
        "recipe": plan.name,
        "trained with": f"rft {__version__}",
        "steps": f"{latest.step} of {plan.steps}",
        "algorithm": f"{plan.advantage.kind}, {plan.loss.kind}, KL {plan.loss.kl_coefficient:g}",
        "learning rate": f"{plan.learner.lr:g} ({plan.learner.schedule})",
        "batch": f"{plan.batch.prompts_per_step} prompts x {plan.batch.samples_per_prompt} samples a step",
        "training data": ", ".join(spec.name for spec in plan.data.train),
        "seed": str(plan.seed),
    }
    for label, parts in plan.rewards.labels.items():
        rows[f"reward `{label}`"] = " + ".join(f"{part.weight:g} x {part.name}" for part in parts)
    if latest.reward is not None:
        rows["mean reward of the last step"] = short(latest.reward)
    for name, found in sorted(latest.evals.items()):
        for metric, values in found["metrics"].items():
            rows[f"{name}: {metric} (step {found['step']})"] = interval(*values)
    return {name: text.replace("|", "\\|").replace("\n", " ") for name, text in rows.items()}
