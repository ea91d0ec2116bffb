"""Rules across keys about the critic, discounting, the KL term's place and controller, and the supervised stream. Rows of `rules.RULES`."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import Recipe

PER_TOKEN = frozenset({"gae", "reinforce", "reinforce_pp"})
"""Estimators that can read rewards per token."""
DISCOUNTED = frozenset({"gae", "reinforce"})
"""Those of them that may be discounted."""
CRITICS = frozenset({"gae"})
"""Estimators that read a critic's values."""

KIND: KeyPath = ("algorithm", "advantage", "kind")
CRITIC: KeyPath = ("models", "critic")
KL: KeyPath = ("algorithm", "kl")


def critic(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    kind = recipe.algorithm.advantage.kind
    if kind in CRITICS and recipe.models.critic is None:
        yield Finding(
            path=KIND,
            message=f"`{kind}` needs a critic",
            reason="it compares rewards with the values that a critic predicts",
            hint="`models: {critic: {}}` makes one from the policy",
            reads=(CRITIC,),
        )
    if kind not in CRITICS and recipe.models.critic is not None:
        reason = f"`{kind}` reads no values, so the critic would be trained for nothing"
        hint = "`algorithm.advantage.kind: gae`"
        yield Finding(path=CRITIC, message="nothing reads its values", reason=reason, hint=hint, reads=(KIND,), at_key=True)


def critic_warmup(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    found = recipe.models.critic
    if found is None:
        return
    if found.warmup_steps and found.optimizer.warmup_steps:
        path = (*CRITIC, "optimizer", "warmup_steps")
        yield Finding(path=path, message="is already `models.critic.warmup_steps`", reason="both say the same", reads=((*CRITIC, "warmup_steps"),))
    warmup, end = found.warmup_steps or found.optimizer.warmup_steps, found.optimizer.schedule_steps or recipe.train.steps
    if end is not None and warmup > end:
        path = (*CRITIC, "warmup_steps") if found.warmup_steps else (*CRITIC, "optimizer", "warmup_steps")
        yield Finding(
            path=path,
            message=f"must be at most {end}, the steps of its schedule, got {warmup}",
            reason="the learning rate would never reach its peak",
            reads=(("train", "steps"), (*CRITIC, "optimizer", "schedule_steps")),
        )


def critic_min_lr(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.models.critic is None:
        return
    optimizer, path = recipe.models.critic.optimizer, (*CRITIC, "optimizer", "min_lr")
    if optimizer.min_lr > optimizer.lr:
        message = f"must be at most `lr`, got {optimizer.min_lr:g} above {optimizer.lr:g}"
        yield Finding(path=path, message=message, reads=((*CRITIC, "optimizer", "lr"),))
    elif optimizer.min_lr > 0 and optimizer.schedule == "constant":
        reads = ((*CRITIC, "optimizer", "schedule"),)
        yield Finding(path=path, message="has no effect on a constant schedule", reason="use linear or cosine", reads=reads)


def critic_head(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    found = recipe.models.critic
    if found is not None and found.head is not None and found.from_ == "policy":
        reason = "it names one among the weights of `from`"
        yield Finding(path=(*CRITIC, "head"), message="the policy has no value head", reason=reason, reads=((*CRITIC, "from"),))


def frozen_policy(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    frozen, steps, path = recipe.train.freeze_policy_steps, recipe.train.steps, ("train", "freeze_policy_steps")
    if frozen and recipe.models.critic is None:
        yield Finding(path=path, message="needs a critic", reason="without one nothing would learn in these steps", reads=(CRITIC,))
    elif frozen and steps is not None and frozen >= steps:
        message = f"must be below `train.steps`, got {frozen} of {steps}"
        yield Finding(path=path, message=message, reason="the policy would never be trained", reads=(("train", "steps"),))


def discount(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    advantage = recipe.algorithm.advantage
    if advantage.gamma != 1.0 and advantage.kind not in DISCOUNTED:
        reason = "its returns are not discounted" if advantage.kind in PER_TOKEN else "it has one reward an answer"
        yield Finding(path=(*KIND[:2], "gamma"), message=f"has no effect with `{advantage.kind}`", reason=reason, reads=(KIND,))
    if advantage.lam != 1.0 and advantage.kind not in CRITICS:
        reason = "it weighs a critic's values"
        yield Finding(path=(*KIND[:2], "lam"), message=f"has no effect with `{advantage.kind}`", reason=reason, reads=(KIND,))


def kl_level(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    kl, kind, path = recipe.algorithm.kl, recipe.algorithm.advantage.kind, (*KL, "level")
    if kl.level != "auto" and kl.place == "loss":
        reason = "in the loss the term is added for each token, and aggregated as `algorithm.loss.aggregate` says"
        yield Finding(path=path, message="has no effect with `place: loss`", reason=reason, reads=((*KL, "place"),))
    elif kl.level == "token" and kind not in PER_TOKEN:
        reason = f"`{kind}` has one reward an answer"
        yield Finding(path=path, message=f"must be sequence or mean for `{kind}`", reason=reason, reads=(KIND, (*KL, "place")))


def kl_controller(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    kl = recipe.algorithm.kl
    here, kind = (*KL, "controller"), (*KL, "controller", "kind")
    if kl.controller.kind == "adaptive":
        if kl.controller.target is None:
            yield Finding(path=kind, message="needs a `target`", hint="for example `target: 0.05`, in nats", reads=((*here, "target"),))
        if kl.coefficient == 0:
            reason = "the coefficient is multiplied from step to step, and 0 stays 0"
            yield Finding(path=kind, message="needs a `coefficient` above 0 to start from", reason=reason, reads=((*KL, "coefficient"),))
    elif kl.controller.target is not None:
        yield Finding(path=(*here, "target"), message="has no effect with `kind: fixed`", reads=(kind,))


def supervised_source(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.train.supervised is None:
        return
    here, source = ("train", "supervised", "data"), recipe.train.supervised.data
    if source.path is None and source.python is None:
        yield Finding(path=here, message="needs `path` or `python`", reads=((*here, "path"), (*here, "python")), at_key=True)
    if source.path is not None and source.python is not None:
        yield Finding(path=(*here, "python"), message="`path` and `python` exclude each other", reason="a stream has one set")
    if source.options and source.python is None:
        message, reason = "only a `python` source takes options", "they would have no effect"
        yield Finding(path=(*here, "options"), message=message, reason=reason, reads=((*here, "python"),), at_key=True)
