"""What differs between the plan a run was made with and the one it shall go on with, and whether that is allowed.

free: the run is the same run (logging, cadence, more steps). risky: it goes on, and is no longer the run it would have been; the person has to say
`--accept`. impossible: what was learnt does not fit any more. Pure; leaves out where the new plan comes from (`replan`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rftcli.codec import to_data
from rftcli.plan.plan import Plan

FREE, RISKY, IMPOSSIBLE, FOLLOWS = "free", "risky", "impossible", "follows"
SHOWN_CHARACTERS = 60
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    path: str
    before: str
    after: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.path}: {self.before} -> {self.after} ({self.reason})"


def changes(old: Plan, new: Plan, used_labels: Collection[str] = ()) -> tuple[Change, ...]:
    """Every difference but those that only follow from others, impossible ones first. `used_labels`: labels that completions of the run had."""
    found = []
    differences = list(_differences(to_data(old), to_data(new), ()))
    changed = {path for path, _, _ in differences}
    for path, before, after in differences:
        kind, reason = FOLLOWED if _follows(path, changed) else classify(path)
        if len(path) == 3 and path[:2] == ("rewards", "labels") and after is _ABSENT:
            used = path[2] in used_labels
            kind, reason = (IMPOSSIBLE, "completions of this run were rewarded by it") if used else (FREE, "no completion of this run had this label")
        if kind != FOLLOWS:
            found.append(Change(path=".".join(path), before=_shown(before), after=_shown(after), kind=kind, reason=reason))
    order = (IMPOSSIBLE, RISKY, FREE)
    return tuple(sorted(found, key=lambda change: order.index(change.kind)))


def _follows(path: tuple[str, ...], changed: Collection[tuple[str, ...]]) -> bool:
    """Is it a key of DeepSpeed that the plan derives from another field, which has changed too and is told itself?"""
    if "deepspeed" not in path:
        return False
    learner = path[: path.index("deepspeed")]
    return any(cause in changed for cause in (*DEEPSPEED_CAUSES, (*learner, "max_grad_norm"), (*learner, "zero_stage")))


def classify(path: tuple[str, ...]) -> tuple[str, str]:
    """(kind, reason) of a field of the plan by its path. What no row names is risky."""
    row = row_of(path)
    return UNKNOWN if row is None else CHANGES[row]


def row_of(path: tuple[str, ...]) -> str | None:
    """The first row of CHANGES that names the path."""
    return next((pattern for pattern in CHANGES if _matches(pattern.split("."), path)), None)


def _matches(pattern: list[str], path: tuple[str, ...]) -> bool:
    """`*` is one name, a last `**` any number of them."""
    if pattern[-1] == "**":
        pattern = pattern[:-1]
        path = path[: len(pattern)]
    return len(pattern) == len(path) and all(mine in ("*", theirs) for mine, theirs in zip(pattern, path, strict=True))


def _differences(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    old, new = _by_name(old), _by_name(new)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in {**old, **new}:
            yield from _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), (*path, str(key)))
    elif old is _ABSENT or new is _ABSENT or old != new:
        yield path, old, new


def _by_name(value: Any) -> Any:
    """A list of named things as a mapping, so that a new first one is not a change of all; its order is part of it."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        names = [str(item["name"]) for item in value]
        return dict(zip(names, value, strict=True)) if len(set(names)) == len(names) else value
    return value


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, Mapping) and "name" in value and "format" not in value:
        return "present"
    text = "null" if value is None else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


DEEPSPEED_CAUSES = (("world", "ranks"), ("world", "device"), ("policy", "dtype"), ("policy", "lora"))
"""What a plan derives DeepSpeed's configuration from, beside the learner's own fields; none of them changes without being asked about."""
FOLLOWED = (FOLLOWS, "from what has changed with it")
UNKNOWN = (RISKY, "it is not known what a change of it does to a run")

_ENGINE: dict[str, tuple[str, str]] = {
    "options.**": (RISKY, "an engine started in another way"),
    "seeds": (RISKY, "other samples"),
    "memory": (FOLLOWS, "words"),
    "cache_bytes": (FOLLOWS, "from the memory share"),
    "cache_tokens": (FOLLOWS, "from the memory share"),
    "weight_bytes": (FOLLOWS, "from the model"),
    "**": (FREE, "how fast and in how much memory; the last bits of this engine are not promised"),
}
"""Of an engine with a model of its own."""

# How to add one: a row for each new field of the plan, the narrower pattern before the wider one; the first that matches counts.
CHANGES: dict[str, tuple[str, str]] = {
    "name": (FREE, "only a name"),
    "seed": (RISKY, "the data has another order, which starts over, and samples other keys"),
    "steps": (FREE, "the schedule keeps its horizon"),
    "max_hours": (FREE, "when to stop"),
    "max_tokens": (FREE, "when to stop"),
    "notes": (FOLLOWS, "words"),
    "memory": (FOLLOWS, "an estimate"),
    "memory.**": (FOLLOWS, "an estimate"),
    "format": (IMPOSSIBLE, "another form of plan"),
    "world.ranks": (RISKY, "sums have another order, so the bits differ; the trainer's state is cut anew"),
    "world.device": (RISKY, "other arithmetic, so the bits differ"),
    "world.backend": (FOLLOWS, "from the device"),
    "world.threads_per_rank": (FREE, "how fast, not what"),
    "world.deterministic": (RISKY, "other kernels, so the bits differ"),
    "world.**": (FREE, "where the ranks are, not what they do"),
    "policy.path": (IMPOSSIBLE, "the optimizer's state belongs to the model it was made with"),
    "policy.given": (FOLLOWS, "from the path"),
    "policy.dtype": (IMPOSSIBLE, "master weights and moments have another form"),
    "policy.attention": (RISKY, "log-probs differ in their last bits"),
    "policy.dropout": (RISKY, "another training"),
    "policy.gradient_checkpointing": (FREE, "memory against time, the same numbers"),
    "policy.trust_remote_code": (FREE, "whether code may run, not which"),
    "policy.options": (RISKY, "the model is loaded in another way"),
    "policy.options.**": (RISKY, "the model is loaded in another way"),
    "policy.kernels": (RISKY, "other kernels, so the bits differ"),
    "policy.parameters": (FOLLOWS, "from the path"),
    "policy.revision": (IMPOSSIBLE, "the optimizer's state belongs to the model it was made with"),
    "policy.tokenizer": (IMPOSSIBLE, "other ids"),
    "policy.tokenizer_revision": (IMPOSSIBLE, "other ids"),
    "policy.tokenizer_options": (IMPOSSIBLE, "other ids"),
    "policy.tokenizer_options.**": (IMPOSSIBLE, "other ids"),
    "policy.add_tokens": (IMPOSSIBLE, "another vocabulary"),
    "policy.freeze": (IMPOSSIBLE, "the optimizer's state belongs to other parameters"),
    "policy.lora": (IMPOSSIBLE, "the optimizer's state belongs to other parameters"),
    "policy.lora.dropout": (RISKY, "another training"),
    "policy.lora.**": (IMPOSSIBLE, "the adapter has another form"),
    "policy.quantise": (IMPOSSIBLE, "the weights have another form"),
    "policy.quantise.**": (IMPOSSIBLE, "the weights have another form"),
    "policy.ema": (IMPOSSIBLE, "a running mean begins with the run"),
    "policy.ema.decay": (RISKY, "another running mean"),
    "policy.ema.**": (FREE, "what the running mean is used for"),
    "reference_use": (FOLLOWS, "from whether anything needs a reference"),
    "reference_use.offload": (FREE, "where the reference waits"),
    "reference_use.shard": (FREE, "where the reference is"),
    "reference_use.**": (RISKY, "the KL term compares with another model"),
    "reference.**": (RISKY, "the KL term compares with another model"),
    "teacher.offload": (FREE, "where the teacher waits"),
    "teacher.model.given": (FOLLOWS, "from the path"),
    "teacher.model.parameters": (FOLLOWS, "from the path"),
    "teacher.model.trust_remote_code": (FREE, "whether code may run, not which"),
    "teacher.start.given": (FOLLOWS, "from the path"),
    "teacher.start.parameters": (FOLLOWS, "from the path"),
    "teacher.start.cache_bytes": (FOLLOWS, "from the memory share"),
    "teacher.start.max_model_tokens": (FOLLOWS, "from the lengths of the rollout"),
    **{f"teacher.start.{key}": (RISKY, "another teacher") for key in ("path", "revision", "dtype", "tokenizer", "template", "options.**")},
    "teacher.start.**": (FREE, "where and how the same teacher is started"),
    "teacher.server.url": (FREE, "where the teacher is; that it is the same model is not compared"),
    "teacher.server.timeout_seconds": (FREE, "when to give up"),
    "teacher.server.retries": (FREE, "when to give up"),
    "teacher.server.concurrency": (FREE, "how fast, not what"),
    "teacher.server.headers_env": (FREE, "how the server is asked"),
    "teacher.server.headers_env.**": (FREE, "how the server is asked"),
    "teacher": (RISKY, "another teacher"),
    "teacher.**": (RISKY, "another teacher"),
    "data.eval.**": (FREE, "evaluation does not touch training"),
    "data.train.**": (RISKY, "other rows or another order: the data starts over"),
    "data.**": (RISKY, "other prompts"),
    "rollout.shares_weights": (FOLLOWS, "from the ZeRO stage and the engine"),
    "rollout.partial": (RISKY, "answers that were kept are let go, or tokens of older weights are trained on from now on"),
    "rollout.partial.**": (RISKY, "tokens of other ages; kept answers that become too old are dropped"),
    **{f"rollout.{engine}.{key}": rule for engine in ("vllm", "sglang") for key, rule in _ENGINE.items()},
    "rollout.**": (RISKY, "other samples"),
    "rewards.labels.**": (RISKY, "another reward"),
    "rewards.max_error_rate": (FREE, "when to give up"),
    "rewards.search_path": (FREE, "where code is found; what it does is not compared"),
    "rewards.**": (RISKY, "another reward"),
    "shaping.max_new_tokens": (FOLLOWS, "from the rollout"),
    "shaping.**": (RISKY, "another reward"),
    "advantage.**": (RISKY, "another estimator"),
    "loss.**": (RISKY, "another loss"),
    "batch.equation": (FOLLOWS, "words"),
    "batch.needs_prepass": (FOLLOWS, "from updates and losses"),
    "batch.micro_batch_size": (FREE, "the same gradient up to rounding"),
    "batch.tokens_per_micro_batch": (FREE, "the same gradient up to rounding"),
    "batch.layout": (FREE, "the same gradient up to rounding"),
    "batch.share_prompts": (FREE, "the same gradient up to rounding"),
    "batch.balance": (FREE, "the same gradient up to rounding"),
    "batch.attention_cost": (FOLLOWS, "from the model"),
    "batch.pass_cost": (FOLLOWS, "from model and device"),
    "batch.skip_zero_advantage": (FREE, "the same gradient up to rounding"),
    "batch.**": (RISKY, "another batch"),
    "learner.kind": (IMPOSSIBLE, "the optimizer's state has another form"),
    "learner.compile": (RISKY, "other kernels, so the bits differ"),
    "learner.from_host": (FOLLOWS, "from the machine"),
    "learner.skip_at_most": (FREE, "when to give up"),
    "learner.zero_stage": (IMPOSSIBLE, "the trainer's state has another form"),
    "learner.deepspeed.**": (RISKY, "number types, offloading, or keys of DeepSpeed's own"),
    "learner.**": (RISKY, "another update"),
    "eval.**": (FREE, "evaluation does not touch training"),
    "early_stop": (FREE, "when to stop"),
    "early_stop.**": (FREE, "when to stop"),
    "samples.**": (FREE, "what is written down"),
    "kl": (RISKY, "another KL term"),
    "kl.**": (RISKY, "another KL term"),
    "critic": (IMPOSSIBLE, "the trainer's state holds one role more or less"),
    "critic.model.path": (IMPOSSIBLE, "the optimizer's state belongs to the model it was made with"),
    "critic.model.given": (FOLLOWS, "from the path"),
    "critic.model.dtype": (IMPOSSIBLE, "master weights and moments have another form"),
    "critic.model.gradient_checkpointing": (FREE, "memory against time, the same numbers"),
    "critic.model.trust_remote_code": (FREE, "whether code may run, not which"),
    "critic.model.parameters": (FOLLOWS, "from the path"),
    "critic.head": (IMPOSSIBLE, "the optimizer's state belongs to the head it was made with"),
    "critic.learner.kind": (IMPOSSIBLE, "the optimizer's state has another form"),
    "critic.learner.zero_stage": (IMPOSSIBLE, "the trainer's state has another form"),
    "critic.learner.skip_at_most": (FREE, "when to give up"),
    "critic.learner.deepspeed.**": (RISKY, "number types, offloading, or keys of DeepSpeed's own"),
    "critic.**": (RISKY, "another critic"),
    "freeze_policy_steps": (RISKY, "the policy learns from another step on"),
    "supervised": (RISKY, "known answers join the update, or leave it"),
    "supervised.**": (RISKY, "other known answers, or another weight of them"),
    "scorers.*.service.**": (FREE, "where and how the same service is asked"),
    "scorers.*.service": (RISKY, "another reward"),
    "scorers.*.cache": (FREE, "what is asked again"),
    "scorers.*.batch_size": (FREE, "how many rows a request has"),
    "scorers.*.memory_gib": (FREE, "what the memory plan counts with"),
    "scorers.*.weights": (RISKY, "another reward"),
    "scorers.*.weights.given": (FOLLOWS, "from the path"),
    "scorers.*.weights.parameters": (FOLLOWS, "from the path"),
    "scorers.*.weights.offload": (FREE, "where the weights wait"),
    "scorers.*.weights.beside_gib": (FOLLOWS, "from what the engine's cache holds"),
    "scorers.*.weights.engine": (RISKY, "another engine's replies"),
    "scorers.*.weights.sharded": (FREE, "where the weights lie, the same score up to rounding"),
    "scorers.*.weights.batch_tokens": (FREE, "the same score up to rounding"),
    "scorers.*.weights.trust_remote_code": (FREE, "whether code may run, not which"),
    "scorers.*.start.path": (RISKY, "another reward"),
    "scorers.*.start.given": (FOLLOWS, "from the path"),
    "scorers.*.start.parameters": (FOLLOWS, "from the path"),
    "scorers.*.start.cache_bytes": (FOLLOWS, "from the memory share"),
    **{f"scorers.*.start.{key}": (RISKY, "another reward") for key in ("revision", "dtype", "tokenizer", "template", "options.**")},
    "scorers.*.start.**": (FREE, "where and how the same judge is started"),
    "scorers.**": (RISKY, "another reward"),
    "checkpoint.**": (FREE, "when to save and what stays"),
    "launch.**": (FREE, "how the ranks are started"),
    "profile.**": (FREE, "what is measured"),
    "track.**": (FREE, "who watches"),
}
"""Pattern of a field's path in the plan -> kind and reason."""
