"""Rules of `rollout.vllm` across keys: what the plan decides itself, and what cannot be checked or sampled there. Other fast engines share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rftcli.recipe import server_rules
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.sections import Recipe, SglangEngine, VllmEngine
from rftcli.recipe.sections.rollout import HfOptions

OWNED: dict[str, str] = {
    "model": "models.policy.path", "tokenizer": "models.policy.tokenizer", "dtype": "models.policy.dtype", "revision": "models.policy.revision",
    "trust_remote_code": "models.policy.trust_remote_code", "seed": "seed", "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "gpu_memory_utilization": "rollout.vllm.memory_share", "kv_cache_memory_bytes": "rollout.vllm.memory_share",
    "enable_lora": "rollout.vllm.lora", "max_lora_rank": "rollout.vllm.lora", "max_loras": "rollout.vllm.lora",
    "max_cpu_loras": "rollout.vllm.lora", "lora_dtype": "rollout.vllm.lora",
    "max_model_len": "rollout.vllm.max_model_tokens", "max_num_seqs": "rollout.vllm.max_sequences", "enable_sleep_mode": "rollout.vllm.sleep",
}  # fmt: skip
"""Argument of `vllm.LLM` -> the key that decides it."""
FIXED: dict[str, str] = {
    "load_format": "weights come from the trainer", "distributed_executor_backend": "it follows from where the engine runs",
    "pipeline_parallel_size": "the engine runs inside the training ranks", "data_parallel_size": "every group of ranks has an engine of its own",
    "logprobs_mode": "log-probs are those of the distribution that is sampled from", "skip_tokenizer_init": "it follows from the sampling keys",
    "generation_config": "sampling is what the recipe says and nothing else",
    "runner": "the engine generates",
}  # fmt: skip
"""Argument of `vllm.LLM` -> why it is not to be chosen."""


def own_arguments(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    yield from options_of("vllm", recipe.rollout.vllm.options, OWNED, FIXED)


def checkable_weights(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    yield from compared("vllm", recipe.rollout.vllm)


def hf_sampling(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    if recipe.rollout.engine == "vllm" or (recipe.rollout.engine == "auto" and recipe.rollout.vllm.server is not None):
        yield from hf_options("vLLM", recipe)


def together(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """Ranks that share an engine call it equally often."""
    yield from alike("vllm", recipe)


MOST_RANK = 512
WITHOUT_LAYERS = ("embed_tokens", "lm_head", "wte", "wpe", "embed_out")
"""Names of modules of models in which vLLM has no place for an adapter, or one of another form."""
WITHOUT_FORM = ("use_dora", "rank_pattern", "alpha_pattern", "target_parameters", "bias", "lora_bias", "trainable_token_indices")
"""Options of LoRA that vLLM computes in no way, or not in all releases."""


def adapter(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """What vLLM cannot serve beside the base can be merged into it."""
    section, engine = recipe.rollout.vllm, recipe.rollout.engine
    if engine not in ("auto", "vllm") or section.lora != "adapter":
        return
    here, lora = ("models", "policy", "lora"), recipe.models.policy.lora
    asked, hint = (("rollout", "vllm", "lora"),), "rollout.vllm.lora: merged"
    elsewhere = ("server",) if section.server is not None else ("process",) if section.process == "beside" else ()
    for key in elsewhere:
        why = "in another process only whole weights have a way to it, and a proof that they arrived"
        yield Finding(path=asked[0], message="`adapter` needs an engine inside the ranks", reason=why, hint=hint, reads=(("rollout", "vllm", key),))
    if lora is None:
        yield Finding(path=asked[0], message="needs `models.policy.lora`", reason="there is no adapter", hint=hint, reads=(here,))
        return
    apart = {
        "save_also": (bool(lora.save_also), "modules that are trained whole are not part of what vLLM loads as an adapter"),
        "start_from": (lora.start_from is not None, "its rank, which vLLM makes room for, is not known before it is loaded"),
    }
    for key, (given, why) in apart.items():
        if given:
            message = "does not go with `rollout.vllm.lora: adapter`"
            yield Finding(path=(*here, key), message=message, reason=why, hint=hint, reads=asked, at_key=True)
    if lora.rank > MOST_RANK:
        yield Finding(path=(*here, "rank"), message=f"is at most {MOST_RANK} for an adapter in vLLM, got {lora.rank}", hint=hint, reads=asked)
    targets = () if isinstance(lora.targets, str) else lora.targets
    for number, name in enumerate(targets):
        if name.rpartition(".")[2] in WITHOUT_LAYERS:
            why = "vLLM has no place for an adapter there"
            yield Finding(path=(*here, "targets", number), message=f"`{name}` cannot be adapted in vLLM", reason=why, hint=hint, reads=asked)
    for name in lora.options:
        if name in WITHOUT_FORM:
            why = "vLLM has no such adapters"
            message = f"`{name}` does not go with `rollout.vllm.lora: adapter`"
            yield Finding(path=(*here, "options", name), message=message, reason=why, hint=hint, reads=asked, at_key=True)


# what the fast engines share


def options_of(engine: str, options: Mapping[str, Any], owned: Mapping[str, str], fixed: Mapping[str, str]) -> Iterator[Finding]:
    for name in options:
        path, argument = ("rollout", engine, "options", name), name.replace("-", "_")  # a server's command line takes both
        if argument in owned:
            yield Finding(path=path, message=f"has a key of its own: `{owned[argument]}`", at_key=True)
        elif argument in fixed:
            yield Finding(path=path, message=f"`{name}` is not to be chosen", reason=fixed[argument], at_key=True)


def compared(engine: str, section: VllmEngine | SglangEngine) -> Iterator[Finding]:
    if not section.check_weights:
        return
    path = ("rollout", engine, "check_weights")
    if section.tensor_parallel > 1:
        why = "some weights are split over the ranks and others repeated on them: their sums cannot be told apart"
        yield Finding(path=path, message="needs `tensor_parallel: 1`", reason=why, reads=(("rollout", engine, "tensor_parallel"),))
    if "quantization" in section.options:
        yield Finding(
            path=path,
            message="does not go with a quantised engine",
            reason="its weights are not the trainer's bits",
            reads=(("rollout", engine, "options"),),
        )


def hf_options(shown: str, recipe: Recipe) -> Iterator[Finding]:
    if recipe.rollout.hf.options != HfOptions():
        yield Finding(
            path=("rollout", "hf", "options"),
            message="are options of the engine `hf`",
            reason=f"{shown} has no such sampling",
            reads=(("rollout", "engine"),),
            at_key=True,
        )


def alike(engine: str, recipe: Recipe) -> Iterator[Finding]:
    rollout = recipe.rollout
    section = getattr(rollout, engine)
    if section.tensor_parallel == 1 or getattr(section, "server", None) is not None:
        return
    for name, used in (
        ("by_label", bool(rollout.by_label)),
        ("over_sample", rollout.over_sample is not None),
        ("partial", rollout.partial is not None),
    ):
        if used:
            reason = "how often a rank calls the engine would depend on its own prompts, and the others would wait"
            reads = (("rollout", engine, "tensor_parallel"),)
            yield Finding(path=("rollout", name), message=f"needs `rollout.{engine}.tensor_parallel: 1`", reason=reason, reads=reads, at_key=True)


Row = tuple[tuple[str, ...], str, Callable[[Recipe, KnownRules | None], Iterator[Finding]]]
# How to add one: a small function above and a line here.
ROWS: dict[str, Row] = {
    "vllm-arguments": (("rollout.vllm.options",), "What has a key of its own, or follows from one, is no option.", own_arguments),
    "vllm-check": (
        ("rollout.vllm.check_weights", "rollout.vllm.tensor_parallel"),
        "Weights are compared where an engine holds them whole and as they are.",
        checkable_weights,
    ),
    "vllm-sampling": (
        ("rollout.engine", "rollout.hf.options", "rollout.vllm.server"),
        "`hf.options` are sampling options of the engine `hf`.",
        hf_sampling,
    ),
    "vllm-together": (
        ("rollout.vllm.tensor_parallel", "rollout.by_label", "rollout.over_sample", "rollout.partial"),
        "Ranks of one engine call it alike.", together,
    ),
    "vllm-lora": (
        ("rollout.vllm.lora", "rollout.vllm.process", "rollout.vllm.server", "models.policy.lora"),
        "vLLM serves plain adapters by themselves, inside the ranks; every other is merged.",
        adapter,
    ),
    **server_rules.ROWS,
}  # fmt: skip
"""Code -> keys it concerns, the rule in one sentence, its check."""
