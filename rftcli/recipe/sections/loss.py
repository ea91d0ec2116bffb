"""`algorithm.loss`: the policy loss, and what stands between a sampler and a trainer that are not quite the same."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rftcli.recipe.sections.base import Options, Section, Target

Positive = Annotated[float, Field(gt=0)]

NAMED_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ppo_clip", "rloo_sequence", "gspo", "clip_cov"), ("clip_low", "clip_high", "dual_clip")),
    **dict.fromkeys(("gmpo", "cispo", "cpg"), ("clip_low", "clip_high")),
    **dict.fromkeys(("sapo", "kl_cov", "reinforce", "dro", "python"), ()),
}
"""Loss -> which keys of its section it reads."""
LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("ppo_clip", "rloo_sequence", "gspo", "gmpo", "cispo", "python")},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "cpg": {"drift": 0.0, "drift_bound": None},
    "clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0},
    "kl_cov": {"share": 2e-3, "beta": 1.0},
    "reinforce": {"importance_weight": False},
    "dro": {"beta": 0.1},
}
"""Loss -> what its `options` may hold, with defaults. Those of an own loss are its function's."""
_SHARE = "Share of the update's trained tokens that are chosen, at least one."
OPTION_MEANINGS: dict[str, dict[str, str]] = {
    "sapo": {
        "tau_positive": "How steeply the weight falls away from a ratio of 1, for positive advantages.",
        "tau_negative": "The same for advantages of 0 and below; above the other, such tokens are held more tightly.",
    },
    "cpg": {
        "drift": "Coefficient of the drift from the old policy, rho - 1 - log rho; 0 is off.",
        "drift_bound": "Largest pull of the drift on a token; null does not bound it.",
    },
    "clip_cov": {
        "share": f"{_SHARE} They lose their policy term.",
        "low": "Covariance above which a token may be chosen.",
        "high": "Covariance below which a token may be chosen.",
    },
    "kl_cov": {
        "share": f"{_SHARE} Those of highest covariance pay the penalty.",
        "beta": "Coefficient of the penalty, |new - old| of a chosen token.",
    },
    "reinforce": {"importance_weight": "Whether the log-prob is weighted with the ratio of new to old policy, which has no bound."},
    "dro": {"beta": "Coefficient of the parabola around the old log-prob: how strongly a token is held there."},
}
"""Loss -> what each of its `options` means."""
KIND_DEFAULTS: dict[str, dict[str, Any]] = {
    "rloo_sequence": {"aggregate": "sequence_mean"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence_mean"},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4, "aggregate": "sequence_mean"},
    "cispo": {"clip_low": 1.0},
    "sapo": {"aggregate": "sequence_mean"},
}
"""Loss -> defaults of its section that are not those of ppo_clip."""
ONE_TERM = ("rloo_sequence", "gmpo")
"""Losses with one term an answer."""


class Reject(Section):
    """Which completions leave the update because their sampler was too far away."""

    by: Literal["k1", "k2", "k3", "max"] = Field(
        "k1",
        description="What is measured over a completion: the geometric mean of the ratios; the mean of half the squared log-ratio; the mean, or the "
        "largest, of ratio - 1 - log ratio.",
    )
    band: tuple[Positive, Positive] | None = Field(None, description="k1: where the geometric mean of the ratios has to lie, as in [0.999, 1.001].")
    bound: Positive | None = Field(None, description="k2, k3 and max: what the measure may be at most.")


class Correction(Section):
    """Weights for the difference between the sampler's and the trainer's log-probs."""

    kind: Literal["truncate", "mask", "reject"] = Field(
        "truncate",
        description="What the ratio trainer / sampler weighs the policy term with: itself up to `cap` (TIS); itself inside `band`, else 0 (IcePop); "
        "nothing, only completions are rejected.",
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="Whose ratio: the token's, the product over the completion, or the geometric mean over it."
    )
    cap: float = Field(2.0, gt=0, description="truncate: the largest weight.")
    band: tuple[Positive, Positive] = Field((0.5, 5.0), description="mask: where the ratio has to lie.")
    gate: Literal["ratio", "tv", "kl"] = Field(
        "ratio",
        description="mask: what decides; the ratio, or the total variation or KL divergence of the two policies over {this token, any other}.",
    )
    bound: Positive | None = Field(None, description="mask with the gate tv or kl: what the divergence may be at most.")
    batch_normalise: bool = Field(False, description="Whether weights are divided by their mean over the step.")
    reject: Reject | None = Field(None, description="Which completions leave the update; null rejects none.")


class EntropyController(Section):
    """An entropy bonus that works towards a target."""

    target: float = Field(gt=0, description="Entropy, in nats a token, up to which the bonus is applied.")
    delta: float = Field(0.005, gt=0, description="How much the coefficient rises after an update at or below the target, and falls above it.")
    min: float = Field(0.0, ge=0, description="Smallest coefficient.")
    max: float = Field(1.0, gt=0, description="Largest coefficient.")


class Loss(Section):
    """The policy loss."""

    kind: Literal[
        "ppo_clip", "rloo_sequence", "gspo", "gmpo", "cispo", "sapo", "cpg", "clip_cov", "kl_cov", "reinforce", "dro", "python"
    ] = Field("ppo_clip", description="Policy loss; `python` is a function of your own.")
    python: Target | None = Field(None, description="kind python: `module:function` of (new, old, advantages), the loss of each token.")
    clip_low: float = Field(
        0.2,
        gt=0,
        le=1,
        description="How far the ratio may fall below 1 before its gradient is cut; 3e-4 for gspo, 0.4 in log space for gmpo, 1 (no floor) for "
        "cispo.",
    )
    clip_high: float = Field(
        0.2,
        gt=0,
        description="How far the ratio may rise above 1 before its gradient is cut; 4e-4 for gspo, 0.4 in log space for gmpo, needed for cispo.",
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Upper bound of the loss per unit of negative advantage, usually 3; null is off."
    )
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = Field(
        "token_mean",
        description="What the token losses of one optimizer update are divided by, over all ranks and micro-batches; sequence_mean for gspo and "
        "sapo, and the only one for losses with one term an answer.",
    )
    options: Options = Field(default_factory=dict, description="Further numbers of the loss, by their names there; of an own loss, its function's.")
    old: Literal["auto", "current", "recompute", "sampler"] = Field(
        "auto",
        description="Log-probs that the ratio starts from: recomputed before the update when something needs them (auto) or always (recompute), "
        "never (current: those of the only update's own pass), or as the engine reported them (sampler).",
    )
    correction: Correction | None = Field(None, description="Weights for the difference between sampler and trainer; null is off.")
    off_policy_mask: Positive | None = Field(
        None,
        description="Completions with a negative advantage whose mean log-ratio of old to current policy is above it lose their policy term; null "
        "is off.",
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="Of the entropy bonus: coefficient x mean entropy of a token is taken from the loss.")
    entropy_controller: EntropyController | None = Field(
        None, description="How the coefficient of the entropy bonus follows a target; null keeps it."
    )
    top_entropy_share: float = Field(
        1.0, gt=0, le=1, description="Share of an update's tokens, those of highest entropy, whose policy term counts; 1 takes all."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_kind(cls, values: Any) -> Any:
        """What is not written has the default of its loss."""
        if isinstance(values, dict) and isinstance(values.get("kind"), str):
            return {**KIND_DEFAULTS.get(values["kind"], {}), **values}
        return values
