"""Rules across keys of the policy loss, the correction and the KL term in the loss. `rules.RULES` holds them with the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rftcli.recipe.finding import Finding, KnownRules, Rule
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import Correction, HfEngine, Loss, Recipe, Rollout
from rftcli.recipe.sections.loss import LOSS_OPTIONS, NAMED_OPTIONS, ONE_TERM

LOSS: KeyPath = ("algorithm", "loss")
KIND: KeyPath = (*LOSS, "kind")
CORRECTION: KeyPath = (*LOSS, "correction")
REJECT: KeyPath = (*CORRECTION, "reject")
KL: KeyPath = ("algorithm", "kl")


def keys_of_the_kind(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    loss = recipe.algorithm.loss
    for name in ("clip_low", "clip_high", "dual_clip"):
        if name not in NAMED_OPTIONS[loss.kind] and getattr(loss, name) != Loss.model_fields[name].default:
            kinds = ", ".join(kind for kind, names in NAMED_OPTIONS.items() if name in names)
            yield Finding(path=(*LOSS, name), message=f"has no effect with `{loss.kind}`", reason=f"read by {kinds}", reads=(KIND,))
    if loss.kind == "cispo" and "clip_high" not in loss.model_fields_set:
        reason = "its weight is capped at 1 + clip_high: a cap of 5 elsewhere is 4 here"
        yield Finding(path=KIND, message="`cispo` needs `clip_high`", reason=reason, reads=((*LOSS, "clip_high"),))
    if loss.kind in ONE_TERM and loss.aggregate != "sequence_mean":
        reason = "it has one term an answer, whose mean over answers is the loss"
        path: KeyPath = (*LOSS, "aggregate")
        yield Finding(path=path, message=f"must be sequence_mean for `{loss.kind}`, got {loss.aggregate}", reason=reason, reads=(KIND,))
    if (loss.kind == "python") != (loss.python is not None):
        missing = loss.kind == "python"
        yield Finding(
            path=KIND if missing else (*LOSS, "python"),
            message="`python` needs the key `python`" if missing else f"has no effect with `{loss.kind}`",
            hint="`python: module:function`" if missing else "`kind: python`",
            reads=((*LOSS, "python"), KIND),
        )


def options(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    loss = recipe.algorithm.loss
    if loss.kind == "python":
        return
    known = LOSS_OPTIONS[loss.kind]
    for name, value in loss.options.items():
        path: KeyPath = (*LOSS, "options", name)
        if name in NAMED_OPTIONS["ppo_clip"]:
            yield Finding(path=path, message=f"`{name}` has a key of its own", hint=f"set `algorithm.loss.{name}`", at_key=True, reads=(KIND,))
        elif name not in known:
            others = [kind for kind, options in LOSS_OPTIONS.items() if name in options]
            why = f"{', '.join(f'`{kind}`' for kind in others)} {'has' if len(others) == 1 else 'have'} it" if others else None
            message = f"`{loss.kind}` has no option `{name}`"
            yield Finding(path=path, message=message, reason=why, allowed=tuple(known), at_key=True, reads=(KIND,))
        elif value is None and known[name] is None:
            continue  # off, as it is anyway
        elif not _fits(name, value):
            yield Finding(path=path, message=f"must be {OPTION_WORDS[name]}, got {value!r}", reads=(KIND,))
    if loss.kind == "cpg" and loss.options.get("drift_bound") is not None and not loss.options.get("drift"):
        yield Finding(path=(*LOSS, "options", "drift_bound"), message="has no effect without `drift`", reads=(KIND,), at_key=True)
    if loss.kind == "clip_cov":
        merged = {**known, **loss.options}
        if _fits("low", merged["low"]) and _fits("high", merged["high"]) and merged["low"] >= merged["high"]:
            path = (*LOSS, "options", "low" if "low" in loss.options else "high")
            yield Finding(path=path, message=f"`low` must be below `high`, got {merged['low']:g} and {merged['high']:g}", reads=(KIND,))


def _fits(name: str, value: Any) -> bool:
    if name == "importance_weight":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return {"above 0": value > 0, "above 0 and at most 1": 0 < value <= 1, "at least 0": value >= 0}.get(OPTION_WORDS[name], True)


OPTION_WORDS = {
    "tau_positive": "above 0",
    "tau_negative": "above 0",
    "drift": "at least 0",
    "drift_bound": "above 0",
    "share": "above 0 and at most 1",
    "low": "a number",
    "high": "a number",
    "beta": "at least 0",
    "importance_weight": "true or false",
}
"""Option -> what it may be, in words; `_fits` reads them."""


def correction(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    found = recipe.algorithm.loss.correction
    if found is None:
        return
    default, kind = Correction(), (*CORRECTION, "kind")
    without_effect = {
        "cap": found.kind != "truncate" and found.cap != default.cap,
        "band": found.band != default.band and (found.kind != "mask" or found.gate != "ratio"),
        "gate": found.kind != "mask" and found.gate != default.gate,
        "bound": found.bound is not None and (found.kind != "mask" or found.gate == "ratio"),
        "batch_normalise": found.kind == "reject" and found.batch_normalise,
        "level": found.kind == "reject" and found.level != default.level,
    }
    for name, idle in without_effect.items():
        if idle:
            what = f"`kind: {found.kind}`" if found.kind != "mask" else f"the gate `{found.gate}`"
            yield Finding(path=(*CORRECTION, name), message=f"has no effect with {what}", reads=(kind, (*CORRECTION, "gate")))
    if found.kind == "reject" and found.reject is None:
        hint = "for example `reject: {by: k1, band: [0.999, 1.001]}`"
        yield Finding(path=kind, message="`reject` needs the key `reject`", hint=hint, reads=(REJECT,))
    if found.kind == "mask" and found.gate != "ratio":
        if found.bound is None:
            yield Finding(path=(*CORRECTION, "gate"), message=f"`{found.gate}` needs a `bound`", reads=((*CORRECTION, "bound"), kind))
        if found.level != "token":
            reason = "the two divergences are a token's"
            yield Finding(path=(*CORRECTION, "level"), message=f"must be token for the gate `{found.gate}`", reason=reason, reads=(kind,))
    yield from _bands(found)
    if recipe.algorithm.loss.kind in ONE_TERM and found.level == "token" and found.kind != "reject":
        reason = f"`{recipe.algorithm.loss.kind}` has one term an answer"
        path = (*CORRECTION, "level")
        yield Finding(path=path, message="must be sequence or geometric", reason=reason, reads=(KIND, kind, CORRECTION), at_key=True)


def _bands(found: Correction) -> Iterator[Finding]:
    if found.band[0] >= found.band[1]:
        yield Finding(path=(*CORRECTION, "band"), message=f"must rise, got {found.band[0]:g} and {found.band[1]:g}")
    reject = found.reject
    if reject is None:
        return
    needed, other = ("band", "bound") if reject.by == "k1" else ("bound", "band")
    by = (*REJECT, "by")
    if getattr(reject, needed) is None:
        at = by if "by" in reject.model_fields_set else REJECT
        yield Finding(path=at, message=f"`{reject.by}` needs a `{needed}`", reads=((*REJECT, needed),), at_key=at == REJECT)
    if getattr(reject, other) is not None:
        yield Finding(path=(*REJECT, other), message=f"has no effect with `by: {reject.by}`", reads=(by,))
    if reject.band is not None and reject.band[0] >= reject.band[1]:
        yield Finding(path=(*REJECT, "band"), message=f"must rise, got {reject.band[0]:g} and {reject.band[1]:g}")


def reads_the_sampler(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """What cannot be together with the engine's own log-probs."""
    loss = recipe.algorithm.loss
    here: KeyPath = CORRECTION if loss.correction is not None else (*LOSS, "old")
    if loss.correction is None and loss.old != "sampler":
        return
    for name, reshapes in reshaping(recipe.rollout).items():
        if reshapes:
            yield Finding(
                path=("rollout", *name.split(".")),
                message=f"and `{'.'.join(str(piece) for piece in here)}` exclude each other",
                reason="the engine's log-probs would be those of another distribution than the trained one: the ratio would hold the kept mass too",
                reads=(here,),
                at_key=True,
            )
    if loss.old != "sampler":
        return
    old = (*LOSS, "old")
    if loss.correction is not None:
        reason = "the ratio starts at the sampler already, so there is nothing left to correct"
        yield Finding(path=CORRECTION, message="has no effect with `old: sampler`", reason=reason, reads=(old,), at_key=True)
    if loss.kind in ("clip_cov", "kl_cov"):
        reason = "it chooses tokens by the trainer's own log-probs at rollout time"
        yield Finding(path=old, message=f"must not be sampler for `{loss.kind}`", reason=reason, reads=(KIND,))
    if recipe.algorithm.kl.coefficient > 0 and recipe.algorithm.kl.place == "reward":
        reason = "the KL in the reward compares two log-probs of the trainer"
        yield Finding(path=old, message="must not be sampler with the KL term in the reward", reason=reason, reads=((*KL, "place"),))


def reshaping(rollout: Rollout) -> dict[str, bool]:
    """Key of `rollout` -> whether it makes the sampled distribution another one than the model's at the temperature."""
    off = Rollout()
    return {
        **{name: getattr(rollout, name) != getattr(off, name) for name in ("top_p", "top_k", "min_p", "min_new_tokens", "penalties")},
        "logit_bias": bool(rollout.logit_bias),
        "bad_words": bool(rollout.bad_words),
        "structured": rollout.structured is not None,
        "hf.options": rollout.hf.options != HfEngine().options,
    }


def masks(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    loss, batch = recipe.algorithm.loss, recipe.batch
    if loss.kind in ONE_TERM and loss.top_entropy_share < 1:
        reason = "it has one term an answer, of which no token can be left out"
        yield Finding(path=(*LOSS, "top_entropy_share"), message=f"must be 1 for `{loss.kind}`", reason=reason, reads=(KIND,))
    several = batch.updates_per_step * batch.epochs > 1
    if loss.off_policy_mask is not None and not several and loss.correction is None and loss.old != "sampler":
        yield Finding(
            path=(*LOSS, "off_policy_mask"),
            message="has no effect with one update per rollout",
            reason="the policy is the one that sampled: the log-ratio is 0",
            hint="it needs several updates, or the sampler's log-probs (`correction`, or `old: sampler`)",
            reads=(("batch", "updates_per_step"), ("batch", "epochs")),
        )


def entropy_controller(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    loss = recipe.algorithm.loss
    found, here = loss.entropy_controller, (*LOSS, "entropy_controller")
    if found is None:
        return
    if found.min > found.max:
        yield Finding(path=(*here, "min"), message=f"must be at most `max`, got {found.min:g} above {found.max:g}", reads=((*here, "max"),))
    elif not found.min <= loss.entropy_coefficient <= found.max:
        yield Finding(
            path=here,
            message=f"`entropy_coefficient` {loss.entropy_coefficient:g} lies outside [{found.min:g}, {found.max:g}]",
            reason="the coefficient starts there",
            reads=((*LOSS, "entropy_coefficient"), (*here, "min"), (*here, "max")),
            at_key=True,
        )


def kl_gradient(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    kl = recipe.algorithm.kl
    asked = [name for name in ("unbiased_gradient", "ratio_weighted") if getattr(kl, name)]
    for name in asked:
        if kl.place == "reward":
            reason = "no gradient flows through a reward"
            yield Finding(path=(*KL, name), message="has no effect with `place: reward`", reason=reason, reads=((*KL, "place"),))
        elif name == "unbiased_gradient" and kl.estimator == "k2":
            yield Finding(path=(*KL, name), message="is what `k2` has already", reads=((*KL, "estimator"),))
    if len(asked) == 2:
        yield Finding(path=(*KL, asked[1]), message="`unbiased_gradient` and `ratio_weighted` exclude each other", reads=((*KL, asked[0]),))


RULES: dict[str, Rule] = {
    "loss-keys": Rule(
        about=("algorithm.loss.kind", "algorithm.loss.clip_low", "algorithm.loss.clip_high", "algorithm.loss.dual_clip", "algorithm.loss.python",
               "algorithm.loss.aggregate"),
        text="A loss is given the keys that it reads; cispo needs `clip_high`, and a loss with one term an answer a mean over answers.",
        check=keys_of_the_kind,
    ),
    "loss-options": Rule(about=("algorithm.loss.options",), text="A loss takes its own options only.", check=options),
    "correction": Rule(
        about=("algorithm.loss.correction", "algorithm.loss.correction.kind", "algorithm.loss.correction.level", "algorithm.loss.correction.reject"),
        text="A correction is given the keys that its kind, gate and rejection read.",
        check=correction,
    ),
    "sampler-logprobs": Rule(
        about=("algorithm.loss.correction", "algorithm.loss.old", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.penalties"),
        text="The sampler's log-probs are read only where it samples from the distribution that is trained, and once.",
        check=reads_the_sampler,
    ),
    "loss-masks": Rule(
        about=("algorithm.loss.top_entropy_share", "algorithm.loss.off_policy_mask"),
        text="A mask of tokens needs a loss with a term a token, one of stale answers a policy that can have moved.",
        check=masks,
    ),
    "entropy-controller": Rule(
        about=("algorithm.loss.entropy_controller", "algorithm.loss.entropy_coefficient"),
        text="The coefficient of the entropy bonus starts within the controller's bounds.",
        check=entropy_controller,
    ),
    "kl-gradient": Rule(
        about=("algorithm.kl.unbiased_gradient", "algorithm.kl.ratio_weighted"),
        text="The KL term in the loss has one gradient of its choice.",
        check=kl_gradient,
    ),
}
