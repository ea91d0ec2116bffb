"""Rules across keys about advantage estimators, their own keys, and the teacher. ROWS are rows of `rules.RULES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rftcli.recipe import judge_rules
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import Recipe

ADVANTAGE: KeyPath = ("algorithm", "advantage")
KIND: KeyPath = (*ADVANTAGE, "kind")
TEACHER: KeyPath = ("models", "teacher")

OWN_KEYS: dict[str, tuple[tuple[str, ...], str]] = {
    "baseline": (("reinforce",), "other estimators have a baseline of their own, or none"),
    "passk_std": (("grpo_passk",), "`normalise_std` is the same for grpo"),
    "bootstrap_truncated": (("gae",), "only a critic knows what an answer is worth behind its last token"),
    "python": (("python",), "it is the estimator of `kind: python`"),
    "options": (("python",), "they are arguments of the user's function"),
}
"""Key of `algorithm.advantage` -> the estimators that read it, and why no others do."""
SERVER_KEYS = ("api", "served_model", "timeout_seconds", "retries", "concurrency", "headers_env")
PATH_KEYS = ("revision", "dtype", "offload", "placement")
NOT_STARTED = ("api", "served_model", "headers_env", "offload")
"""Keys that mean nothing for a teacher whose server the run starts."""
OWNED = {
    "model": "path", "revision": "revision", "dtype": "dtype", "gpu_memory_utilization": "placement.memory_share",
    "tensor_parallel_size": "placement.gpus",
}  # fmt: skip
"""Argument of `vllm serve` -> the teacher's key for it."""


def own_keys(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    advantage = recipe.algorithm.advantage
    for name, (kinds, reason) in OWN_KEYS.items():
        value = getattr(advantage, name)
        if value != type(advantage).model_fields[name].default and advantage.kind not in kinds:
            yield Finding(path=(*ADVANTAGE, name), message=f"has no effect with `{advantage.kind}`", reason=reason, reads=(KIND,), at_key=True)
    divides = {"grpo": advantage.normalise_std, "gdpo": True, "grpo_passk": advantage.passk_std}
    if advantage.min_std > 0 and not divides.get(advantage.kind, False):
        yield Finding(
            path=(*ADVANTAGE, "min_std"),
            message=f"has no effect with `{advantage.kind}`" + (" as it is set" if advantage.kind in divides else ""),
            reason="nothing is divided by a standard deviation",
            reads=(KIND, (*ADVANTAGE, "normalise_std"), (*ADVANTAGE, "passk_std")),
        )


def own_function(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    advantage = recipe.algorithm.advantage
    if advantage.kind == "python" and advantage.python is None:
        hint = "for example `python: my_module:my_estimator`"
        yield Finding(path=KIND, message="`python` needs a function", hint=hint, reads=((*ADVANTAGE, "python"),))


def sums_of_parts(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """gdpo goes back to the parts, so a reward has to be their sum."""
    if recipe.algorithm.advantage.kind != "gdpo":
        return
    for label, entry in recipe.rewards.items():
        if entry.combine != "sum":
            reason = "it normalises every part on its own and adds them up"
            yield Finding(path=("rewards", label, "combine"), message="must be `sum` for `gdpo`", reason=reason, reads=(KIND,))
        if entry.renormalise:
            reason = "a part that abstains is 0 in its group"
            yield Finding(path=("rewards", label, "renormalise"), message="has no effect with `gdpo`", reason=reason, reads=(KIND,))
    shaping = recipe.reward_shaping
    for key, used in (("running_norm", shaping.running_norm != "off"), ("clip", shaping.clip is not None)):
        if used:
            reason = "it reads the parts and the penalty, not the shaped sum"
            yield Finding(path=("reward_shaping", key), message="has no effect with `gdpo`", reason=reason, reads=(KIND,))
    kl, place = recipe.algorithm.kl, ("algorithm", "kl", "place")
    if kl.coefficient > 0 and kl.place == "reward":
        reason = "as a part of its own the KL would be normalised too, and its coefficient would cancel"
        yield Finding(path=place, message="must be `loss` for `gdpo`", reason=reason, reads=(KIND, ("algorithm", "kl", "coefficient")))


def std_unused(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    advantage = recipe.algorithm.advantage
    if advantage.std == "batch" and not (advantage.kind == "grpo" and advantage.normalise_std):
        without = f"`{advantage.kind}`" if advantage.kind != "grpo" else "`normalise_std: false`"
        yield Finding(
            path=("algorithm", "advantage", "std"),
            message=f"has no effect with {without}",
            reads=(("algorithm", "advantage", "kind"), ("algorithm", "advantage", "normalise_std")),
        )


def teacher(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    advantage, found, path = recipe.algorithm.advantage, recipe.models.teacher, (*ADVANTAGE, "distill_coefficient")
    if found is None:
        if advantage.kind == "distill":
            reason = "its advantages are how much likelier a teacher finds the sampled tokens"
            hint = "`models: {teacher: {path: org/larger-model}}`"
            yield Finding(path=KIND, message="`distill` needs a teacher", reason=reason, hint=hint, reads=(TEACHER,))
        elif advantage.distill_coefficient != 1.0:
            yield Finding(path=path, message="has no effect without `models.teacher`", reads=(TEACHER, KIND), at_key=True)
        return
    kl = recipe.algorithm.kl
    if advantage.kind == "distill" and kl.coefficient > 0 and kl.place == "reward":
        reason = "it reads no rewards, so the KL term would be lost"
        place = ("algorithm", "kl", "place")
        yield Finding(path=place, message="must be `loss` for `distill`", reason=reason, reads=(KIND, ("algorithm", "kl", "coefficient")))
    rollout = recipe.rollout
    temperatures: list[tuple[KeyPath, float | None]] = [(("rollout", "temperature"), rollout.temperature)]
    temperatures += [(("rollout", "first_token_temperature"), rollout.first_token_temperature)]
    temperatures += [(("rollout", "by_label", label, "temperature"), own.temperature) for label, own in rollout.by_label.items()]
    for place, value in temperatures:
        if (found.server is None and found.placement is None) or value is None or value == 1.0:
            continue
        asked = "server" if found.placement is None else "placement"
        yield Finding(
            path=place,
            message=f"must be 1 with `models.teacher.{asked}`, got {value:g}",
            reason="servers give log-probs at temperature 1, and both sides have to be the same distribution",
            reads=((*TEACHER, asked),),
        )


def teacher_place(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    found = recipe.models.teacher
    if found is None:
        return
    if found.path is None and found.server is None:
        yield Finding(path=TEACHER, message="needs `path` or `server`", reads=((*TEACHER, "path"), (*TEACHER, "server")), at_key=True)
        return
    if found.path is not None and found.server is not None:
        reason = "there is one teacher"
        yield Finding(path=(*TEACHER, "server"), message="`path` and `server` exclude each other", reason=reason, reads=((*TEACHER, "path"),))
        return
    idle, instead, why = (SERVER_KEYS, "path", "no server is asked") if found.server is None else (PATH_KEYS, "server", "nothing is loaded here")
    if found.placement is not None and found.server is None:
        idle, instead, why = NOT_STARTED, "placement", "the run knows its own server"
        yield from judge_rules.arguments(found.placement.options, (*TEACHER, "placement"), OWNED, TEACHER)
    for name in idle:
        if name in found.model_fields_set and getattr(found, name) != type(found).model_fields[name].default:
            yield Finding(path=(*TEACHER, name), message=f"has no effect with `{instead}`", reason=why, reads=((*TEACHER, instead),), at_key=True)


ROWS: dict[str, tuple[tuple[str, ...], str, Callable[[Recipe, KnownRules | None], Iterator[Finding]]]] = {
    "estimator-keys": (
        tuple(f"algorithm.advantage.{name}" for name in (*OWN_KEYS, "min_std")),
        "Keys of one estimator stand with that estimator alone.",
        own_keys,
    ),
    "own-estimator": (("algorithm.advantage.kind", "algorithm.advantage.python"), "An estimator of one's own has a function.", own_function),
    "gdpo-parts": (
        (
            "algorithm.advantage.kind", "rewards.LABEL.combine", "rewards.LABEL.renormalise", "reward_shaping.running_norm", "reward_shaping.clip",
            "algorithm.kl.place",
        ),
        "gdpo normalises the parts of a reward apart: rewards are sums, and the KL stays in the loss.",
        sums_of_parts,
    ),
    "teacher": (
        ("models.teacher", "algorithm.advantage.kind", "algorithm.advantage.distill_coefficient", "rollout.temperature"),
        "distill needs a teacher; one behind a server needs temperature 1.",
        teacher,
    ),
    "teacher-place": (
        ("models.teacher.path", "models.teacher.server", "models.teacher.placement"),
        "A teacher has exactly one of `path` and `server`, and only the keys of that one.",
        teacher_place,
    ),
}
"""Code -> (patterns of the keys it concerns, the rule in one sentence, its check)."""
