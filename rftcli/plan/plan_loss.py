"""Advantages, KL term and policy loss of a plan, and what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectPlan:
    by: str
    """k1, k2, k3 or max"""
    band: tuple[float, float] | None
    """k1: what the geometric mean of the ratios stays in."""
    bound: float | None
    """The others: what the divergence stays below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionPlan:
    kind: str
    """truncate, mask or reject"""
    level: str
    """token, sequence or geometric"""
    cap: float
    band: tuple[float, float]
    gate: str
    """ratio, tv or kl"""
    bound: float | None
    """Of the gates tv and kl."""
    batch_normalise: bool
    reject: RejectPlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyPlan:
    target: float
    delta: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    kind: str
    options: Mapping[str, Any]
    aggregate: str
    kl_coefficient: float
    """At the start, of the KL term in the loss; 0 where it is in the reward."""
    kl_estimator: str
    router_coefficient: float = 0.0
    """Of the balance of a mixture of experts; 0: it is not measured."""
    python: str | None = None
    """The function of an own loss."""
    old: str = "auto"
    """auto, current, recompute or sampler"""
    correction: CorrectionPlan | None = None
    off_policy_mask: float | None = None
    entropy_coefficient: float = 0.0
    """At the start."""
    entropy_controller: EntropyPlan | None = None
    top_entropy_share: float = 1.0
    kl_gradient: str = "own"
    """Of the KL term in the loss: own, unbiased or ratio_weighted"""

    @property
    def reads_sampler(self) -> bool:
        """The engine reports its log-probs in every step."""
        return self.correction is not None or self.old == "sampler"

    @property
    def entropy_in_loss(self) -> bool:
        return self.entropy_coefficient > 0 or self.entropy_controller is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantagePlan:
    kind: str
    options: Mapping[str, Any]
    per_token: bool = False
    """Advantages are computed from rewards per token."""
    whiten: str = "with_signal"
    """with_signal (where the estimator's formula says so, groups without signal apart), all or off"""
    clip: float | None = None
    bootstrap_truncated: bool = False
    """A cut answer goes on with the critic's value behind its last token."""
    teacher_coefficient: float | None = None
    """Of the teacher's term that is added to the finished advantage; None: nothing is added."""
    python: str | None = None
    """`module:function` of the user's own estimator; `options` are its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPlan:
    """The KL term, wherever it goes."""

    coefficient: float
    """At the start."""
    estimator: str
    place: str
    """loss or reward"""
    level: str
    """What is taken from what in the reward: token, sequence or mean."""
    controller: str
    target: float | None
    horizon: float

    @property
    def in_reward(self) -> bool:
        return self.place == "reward"
