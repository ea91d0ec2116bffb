"""Records of a plan about which completions are asked for and which of them are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rftcli.plan.plan import RolloutPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicPlan:
    """Groups that say nothing are replaced by fresh prompts (DAPO, 2503.14476)."""

    max_extra_rollouts: int
    """Rounds of refilling in a step; what is left without signal then is trained on as it is."""
    low: float | None
    """Groups whose mean of the metric is below are replaced too; None: no bound."""
    high: float | None
    metric: str
    """`reward`, or the name of a reward part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSamplePlan:
    """More prompts are asked for than are trained on; the longest answers are given up."""

    factor: float
    """Prompts asked for over prompts trained on."""
    slice_tokens: int
    """Tokens that answers grow by before whole groups are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPlan:
    """What a step does not finish goes on in the next one."""

    budget_tokens: int | None
    """Tokens that an answer grows by in a step before fresh prompts are asked for; None: over-sampling alone ends a step."""
    max_version_lag: int
    """Updates between the oldest token of a trained group and the weights that train on it, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPlan:
    """Of the samples of a group, so many of the best and of the worst are trained on; baselines see all."""

    best: int
    worst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Prompts whose group had no signal come back."""

    after_steps: int
    times: int
    """How often one prompt may come back."""
    share: float
    """Largest share of a step's prompts that come back."""
    max_waiting: int
    below: float | None
    """Only prompts whose mean reward was below this; None: all without signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSampling:
    """How the training completions of one label are sampled; the rest is as in the rollout."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]

    @property
    def filters(self) -> bool:
        """Does it sample from another distribution than the model's at its temperature?"""
        return (self.top_p, self.top_k, self.min_p, self.min_new_tokens) != (1.0, 0, 0.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumPlan:
    """Which rows are passed over when their turn comes."""

    kind: str
    """pass_rate or python"""
    low: float = 0.0
    """Rows with a measured pass rate below are passed over, but for `share` of them."""
    high: float = 1.0
    share: float = 0.0
    metric: str = "reward"
    pass_mark: float = 1.0
    """A sample passes when its metric is at least this."""
    memory: float = 0.0
    """Weight of what was measured before, against the newest measurement."""
    target: str | None = None
    """python: `module:class`"""
    options: Mapping[str, Any] | None = None


def temperatures(rollout: RolloutPlan, label: str) -> tuple[float, float]:
    """(of the first sampled token, of all others) of a training completion with this label."""
    temperature = rollout.by_label[label].temperature if label in rollout.by_label else rollout.temperature
    return temperature if rollout.first_token_temperature is None else rollout.first_token_temperature, temperature


def one_temperature(rollout: RolloutPlan) -> bool:
    """Is every training token sampled at `rollout.temperature`?"""
    return rollout.first_token_temperature is None and all(own.temperature == rollout.temperature for own in rollout.by_label.values())
