"""Rules across keys of `models`: adapters, quantised weights, running means, revisions. Rows of the table are in `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.names import did_you_mean
from rftcli.recipe.sections import Recipe

LORA_OPTIONS = frozenset({
    "use_rslora", "use_dora", "init_lora_weights", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "lora_bias", "fan_in_fan_out",
})  # fmt: skip
"""Arguments of peft's LoraConfig that `lora.options` takes."""
LORA_KEYS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "modules_to_save": "save_also",
}
"""Argument of LoraConfig -> our key for it."""
LORA_INITS = (True, "gaussian", "orthogonal")
"""Starts that leave the policy what the base is. Others (pissa, olora, ...) change the base weights, so that the base would no longer be the
reference and the adapter would not load on it."""
_LORA = ("models", "policy", "lora")


def lora_options(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    lora = recipe.models.policy.lora
    if lora is None:
        return
    for name, value in lora.options.items():
        path = (*_LORA, "options", name)
        if name in LORA_KEYS:
            yield Finding(path=path, message=f"`{name}` is `models.policy.lora.{LORA_KEYS[name]}` here", at_key=True)
        elif name not in LORA_OPTIONS:
            yield Finding(
                path=path,
                message=f"LoRA has no option `{name}` here",
                reason=did_you_mean(name, LORA_OPTIONS),
                allowed=tuple(sorted(LORA_OPTIONS)),
                at_key=True,
            )
        elif name == "init_lora_weights" and value not in LORA_INITS:
            why = "the policy would not start as its base: the reference would be another model, and the adapter would not load on the base"
            yield Finding(path=path, message=f"must be true, gaussian or orthogonal, got {value}", reason=why)
        elif name == "use_dora" and value and recipe.models.policy.quantise is not None:
            yield Finding(path=path, message="has no exact merged form over quantised weights", hint="leave out `use_dora` or `quantise`")


def lora_targets(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    lora = recipe.models.policy.lora
    if lora is not None and not lora.targets and not lora.options.get("target_parameters"):
        yield Finding(path=(*_LORA, "targets"), message="names no module", hint="leave it out for all linear layers")


def lora_start(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    lora = recipe.models.policy.lora
    if lora is None or lora.start_from is None:
        return
    for name in ("rank", "alpha", "targets", "save_also", "options"):
        if name in lora.model_fields_set:
            why = "the adapter that is gone on from decides it"
            yield Finding(path=(*_LORA, name), message="has no effect with `start_from`", reason=why, reads=((*_LORA, "start_from"),), at_key=True)


def lora_and_freeze(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    policy = recipe.models.policy
    if policy.lora is not None and policy.freeze:
        yield Finding(
            path=("models", "policy", "freeze"),
            message="has no effect with LoRA, which freezes all of the model's own weights",
            hint="leave modules out with `models.policy.lora.options.exclude_modules`",
            reads=(_LORA,),
        )


def reference_shard(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    section, path = recipe.models.reference, ("models", "reference", "shard")
    if section.shard is True and section.offload is True:
        why = "its part of the weights stays on every rank"
        yield Finding(path=path, message="does not go with `offload`", reason=why, reads=(("models", "reference", "offload"),))
    if section.shard is True and section.refresh.every > 0:
        why = "whole weights are mixed"
        yield Finding(path=path, message="does not go with `refresh`", reason=why, reads=(("models", "reference", "refresh", "every"),))


def quantised(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    policy, path = recipe.models.policy, ("models", "policy", "quantise")
    if policy.quantise is None:
        return
    if policy.lora is None:
        yield Finding(path=path, message="needs `models.policy.lora`", reason="weights of a few bits cannot be trained themselves", reads=(_LORA,))
    if policy.path.endswith(".gguf"):
        yield Finding(path=path, message="does not go with a GGUF file, whose blocks are unpacked", hint="give the original weights as `path`")
    if recipe.train.deepspeed.zero_stage == 3:
        yield Finding(
            path=path,
            message="does not go with `train.deepspeed.zero_stage: 3`",
            reason="a partitioned weight loses the scales it was quantised with",
            hint="use stage 2: only the adapter has gradients and optimizer state",
            reads=(("train", "deepspeed", "zero_stage"),),
        )
    if recipe.train.offload.parameters != "none":
        yield Finding(
            path=path,
            message="does not go with `train.offload.parameters`",
            reason="parameters are offloaded under ZeRO stage 3, where a partitioned weight loses the scales it was quantised with",
            hint="quantised weights are small: leave `offload.parameters` out",
            reads=(("train", "offload", "parameters"),),
        )
    for name in ("kind", "nested"):
        if policy.quantise.bits == 8 and name in policy.quantise.model_fields_set:
            yield Finding(path=(*path, name), message="has no effect with 8 bits", reads=((*path, "bits"),), at_key=True)


def ema(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    mean, weights, path = recipe.models.policy.ema, ("eval", "weights"), ("models", "policy", "ema")
    if recipe.eval.weights != "ema":
        return
    if mean is None:
        yield Finding(
            path=weights, message="`ema` needs `models.policy.ema`", hint="`models: {policy: {ema: {}}}` keeps a running mean", reads=(path,)
        )
    elif mean.evaluate:
        yield Finding(
            path=(*path, "evaluate"), message="evaluates the mean a second time: `eval.weights` is ema", hint="keep one of the two", reads=(weights,)
        )


def revision(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    policy = recipe.models.policy
    if policy.revision is not None and policy.path.startswith(("/", "builtin:")):
        why = "only a repository on the hub has revisions"
        yield Finding(
            path=("models", "policy", "revision"), message=f"does not apply to {policy.path}", reason=why, reads=(("models", "policy", "path"),)
        )


def own_arguments(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """Arguments of `from_pretrained` that have keys of their own."""
    policy = recipe.models.policy
    for section, options in (("options", policy.options), ("tokenizer_options", policy.tokenizer_options)):
        for name in ("revision", "trust_remote_code"):
            if name in options:
                yield Finding(path=("models", "policy", section, name), message=f"has a key of its own: `models.policy.{name}`", at_key=True)
    if "use_fast" in policy.tokenizer_options:
        reason = "transformers has one tokenizer for every model since its version 5"
        path = ("models", "policy", "tokenizer_options", "use_fast")
        yield Finding(path=path, message="would have no effect", reason=reason, at_key=True)


def added_tokens(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, token in enumerate(recipe.models.policy.add_tokens):
        if token in seen:
            yield Finding(path=("models", "policy", "add_tokens", index), message=f"`{token}` is listed twice")
        seen.add(token)
