"""`algorithm`: the mathematics of the update."""

from typing import Annotated, Literal

from pydantic import Field

from rftcli.recipe.sections.base import Options, Section, Target
from rftcli.recipe.sections.loss import Loss

GROUP_ESTIMATORS = frozenset({"grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "grpo_passk", "gdpo", "cpgd"})
"""Estimators that compare an answer with the others of its group: they need two samples, and a group without spread teaches nothing."""


class Advantage(Section):
    """How rewards become advantages."""

    kind: Literal[
        "grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gpg", "grpo_passk", "gdpo", "cpgd", "gae", "distill",
        "python",
    ] = Field("grpo", description="Estimator of the advantage.")  # fmt: skip
    normalise_std: bool = Field(True, description="grpo: whether the centred reward is divided by a standard deviation; false is Dr. GRPO.")
    std: Literal["group", "batch"] = Field("group", description="grpo: which rewards the standard deviation is taken over.")
    min_std: float = Field(
        0.0, ge=0, description="grpo, gdpo, grpo_passk: a smaller standard deviation counts as this one, so that small differences stay small."
    )
    passk_std: bool = Field(False, description="grpo_passk: whether the lead of the best completion is divided by the group's standard deviation.")
    baseline: Literal["none", "batch"] = Field("none", description="reinforce: what is taken from the reward; batch: the mean reward of the step.")
    whiten: Literal["with_signal", "all", "off"] = Field(
        "with_signal",
        description="Whether advantages of a step are brought to mean 0 and deviation 1, over all ranks at once. with_signal: where the estimator's "
        "own formula says so, groups without signal left out and at exactly 0; all: every estimator, over every completion; off: never.",
    )
    clip: Annotated[float, Field(gt=0)] | None = Field(None, description="Largest size of an advantage, after whitening; null is off.")
    gamma: float = Field(1.0, gt=0, le=1, description="gae and reinforce: what a reward is multiplied with for each token before it.")
    lam: float = Field(1.0, ge=0, le=1, description="gae: how far the estimate looks past the critic; 1 trusts rewards alone, 0 the next value.")
    bootstrap_truncated: bool = Field(
        False, description="gae: whether an answer that was cut at its length goes on with the critic's value behind its last token, instead of 0."
    )
    distill_coefficient: float = Field(
        1.0,
        gt=0,
        description="With `models.teacher`: weight of the teacher's term, alone (kind distill) or added to the finished advantage of another kind.",
    )
    python: Target | None = Field(
        None,
        description="kind python: `module.path:function` that gives the advantages of a step. Its arguments may be any of rewards, group, sample, "
        "lengths, parts, weights, labels, and its `options`; it returns one finite number for each scored completion of all ranks.",
    )
    options: Options = Field({}, description="kind python: further arguments of the function.")


class KlController(Section):
    """How the coefficient of the KL term changes from step to step."""

    kind: Literal["fixed", "adaptive"] = Field("fixed", description="Whether the coefficient stays, or follows the KL towards `target`.")
    target: Annotated[float, Field(gt=0)] | None = Field(None, description="adaptive: the KL, as it is applied, at which the coefficient stays.")
    horizon: float = Field(10000.0, gt=0, description="adaptive: completions over which an error of 100% would double the coefficient.")


class Kl(Section):
    """The penalty for leaving the reference model."""

    coefficient: float = Field(0.0, ge=0, description="Factor of the KL term; 0 loads no reference model.")
    estimator: Literal["k1", "k2", "k3", "abs"] = Field("k3", description="Estimate of the KL per token, from d = log-prob - reference log-prob.")
    place: Literal["loss", "reward"] = Field("loss", description="Where the KL term is added: to the loss, or taken from the reward.")
    level: Literal["auto", "token", "sequence", "mean"] = Field(
        "auto",
        description="In the reward: taken from the reward of each token, or its sum or mean over the answer from the reward of the answer; auto: "
        "token for gae, reinforce and reinforce_pp, else sequence.",
    )
    unbiased_gradient: bool = Field(
        False, description="In the loss: the estimator's value with the gradient of k2, which is that of KL(policy || reference) on policy."
    )
    ratio_weighted: bool = Field(
        False, description="In the loss: the estimator times the ratio of new to old policy, with the gradient of both; right off policy too."
    )
    controller: KlController = Field(default_factory=KlController, description="How the coefficient changes from step to step.")


class Algorithm(Section):
    """The mathematics of the update."""

    advantage: Advantage = Field(default_factory=Advantage, description="How rewards become advantages.")
    loss: Loss = Field(default_factory=Loss, description="The policy loss.")
    kl: Kl = Field(default_factory=Kl, description="The penalty for leaving the reference model.")
