"""Rules of `rollout.vllm` across keys: what the plan decides itself, and what cannot be checked or sampled there."""

from __future__ import annotations

from collections.abc import Iterator

from rftcli.recipe import server_rules
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.sections import Recipe
from rftcli.recipe.sections.rollout import HfOptions

OWNED: dict[str, str] = {
    "model": "models.policy.path", "tokenizer": "models.policy.tokenizer", "dtype": "models.policy.dtype", "revision": "models.policy.revision",
    "trust_remote_code": "models.policy.trust_remote_code", "seed": "seed", "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "gpu_memory_utilization": "rollout.vllm.memory_share", "kv_cache_memory_bytes": "rollout.vllm.memory_share",
    "max_model_len": "rollout.vllm.max_model_tokens", "max_num_seqs": "rollout.vllm.max_sequences", "enable_sleep_mode": "rollout.vllm.sleep",
}  # fmt: skip
"""Argument of `vllm.LLM` -> the key that decides it."""
FIXED: dict[str, str] = {
    "load_format": "weights come from the trainer", "distributed_executor_backend": "it follows from where the engine runs",
    "pipeline_parallel_size": "the engine runs inside the training ranks", "data_parallel_size": "every group of ranks has an engine of its own",
    "logprobs_mode": "log-probs are those of the distribution that is sampled from", "skip_tokenizer_init": "it follows from the sampling keys",
    "generation_config": "sampling is what the recipe says and nothing else", "enable_lora": "adapters are merged into the weights",
    "runner": "the engine generates",
}  # fmt: skip
"""Argument of `vllm.LLM` -> why it is not to be chosen."""


def own_arguments(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    for name in recipe.rollout.vllm.options:
        path = ("rollout", "vllm", "options", name)
        if name in OWNED:
            yield Finding(path=path, message=f"has a key of its own: `{OWNED[name]}`", at_key=True)
        elif name in FIXED:
            yield Finding(path=path, message=f"`{name}` is not to be chosen", reason=FIXED[name], at_key=True)


def checkable_weights(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    section = recipe.rollout.vllm
    if not section.check_weights:
        return
    path = ("rollout", "vllm", "check_weights")
    if section.tensor_parallel > 1:
        why = "some weights are split over the ranks and others repeated on them: their sums cannot be told apart"
        yield Finding(path=path, message="needs `tensor_parallel: 1`", reason=why, reads=(("rollout", "vllm", "tensor_parallel"),))
    if "quantization" in section.options:
        yield Finding(
            path=path,
            message="does not go with a quantised engine",
            reason="its weights are not the trainer's bits",
            reads=(("rollout", "vllm", "options"),),
        )


def hf_sampling(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    rollout = recipe.rollout
    if rollout.engine == "vllm" and rollout.hf.options != HfOptions():
        yield Finding(
            path=("rollout", "hf", "options"),
            message="are options of the engine `hf`",
            reason="vLLM has no such sampling",
            reads=(("rollout", "engine"),),
            at_key=True,
        )


def together(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """Ranks that share an engine call it equally often."""
    rollout = recipe.rollout
    if rollout.vllm.tensor_parallel == 1 or rollout.vllm.server is not None:
        return
    for name, used in (
        ("by_label", bool(rollout.by_label)),
        ("over_sample", rollout.over_sample is not None),
        ("partial", rollout.partial is not None),
    ):
        if used:
            reason = "how often a rank calls the engine would depend on its own prompts, and the others would wait"
            reads = (("rollout", "vllm", "tensor_parallel"),)
            yield Finding(path=("rollout", name), message="needs `rollout.vllm.tensor_parallel: 1`", reason=reason, reads=reads, at_key=True)


# How to add one: code -> (keys it is about, the rule as one sentence, function that yields a Finding for each breach).
ROWS = {
    "vllm-arguments": (("rollout.vllm.options",), "What has a key of its own, or follows from one, is no option.", own_arguments),
    "vllm-check": (
        ("rollout.vllm.check_weights", "rollout.vllm.tensor_parallel"),
        "Weights are compared where an engine holds them whole and as they are.",
        checkable_weights,
    ),
    "vllm-sampling": (("rollout.engine", "rollout.hf.options"), "`hf.options` are sampling options of the engine `hf`.", hf_sampling),
    "vllm-together": (
        ("rollout.vllm.tensor_parallel", "rollout.by_label", "rollout.over_sample", "rollout.partial"),
        "Ranks of one engine call it alike.", together,
    ),
    **server_rules.ROWS,
}  # fmt: skip
