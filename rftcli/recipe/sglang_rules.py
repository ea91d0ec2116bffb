"""Rules of `rollout.sglang` across keys: what the plan decides itself, and what SGLang samples in no way or in another.

ROWS are rows of `rules.RULES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rftcli.recipe import vllm_rules
from rftcli.recipe.finding import Finding, KnownRules
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.sections import Recipe

OWNED: dict[str, str] = {
    "model_path": "models.policy.path", "tokenizer_path": "models.policy.tokenizer", "dtype": "models.policy.dtype",
    "revision": "models.policy.revision", "trust_remote_code": "models.policy.trust_remote_code", "random_seed": "seed",
    "tp_size": "rollout.sglang.tensor_parallel", "mem_fraction_static": "rollout.sglang.memory_share",
    "max_total_tokens": "rollout.sglang.memory_share", "context_length": "rollout.sglang.max_model_tokens",
    "max_running_requests": "rollout.sglang.max_sequences", "cuda_graph_max_bs": "rollout.sglang.max_sequences",
    "cuda_graph_max_bs_decode": "rollout.sglang.max_sequences", "enable_memory_saver": "rollout.sglang.sleep",
    "enable_weights_cpu_backup": "rollout.sglang.sleep", "enable_deterministic_inference": "rollout.sglang.seeds",
}  # fmt: skip
"""Argument of `sglang.Engine` -> the key that decides it."""
FIXED: dict[str, str] = {
    "load_format": "weights come from the trainer", "custom_weight_loader": "it is how weights are compared",
    "skip_tokenizer_init": "it follows from the sampling keys", "base_gpu_id": "an engine is on the GPUs of its ranks",
    "gpu_id_step": "an engine is on the GPUs of its ranks", "device": "an engine is on the GPUs of its ranks",
    "nnodes": "an engine is on one machine", "node_rank": "an engine is on one machine", "dist_init_addr": "an engine is on one machine",
    "pp_size": "an engine is split by `tensor_parallel` alone", "dp_size": "every group of ranks has an engine of its own",
    "enable_dp_attention": "every group of ranks has an engine of its own", "nccl_port": "a free one is taken",
    "custom_sigquit_handler": "it is how a failed engine is told", "server_args": "the plan holds the arguments one by one",
    "enable_lora": "adapters are merged into the weights", "is_embedding": "the engine generates",
    "tokenizer_worker_num": "the engine is asked by one process", "use_ray": "the engine's processes are this rank's",
}  # fmt: skip
"""Argument of `sglang.Engine` -> why it is not to be chosen."""
MOST_STOPS = 32
PENALTY_LIMIT = 2.0


def own_arguments(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    yield from vllm_rules.options_of("sglang", recipe.rollout.sglang.options, OWNED, FIXED)


def checkable_weights(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    yield from vllm_rules.compared("sglang", recipe.rollout.sglang)


def together(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """Ranks that share an engine call it equally often."""
    yield from vllm_rules.alike("sglang", recipe)


def sampling(recipe: Recipe, _: KnownRules | None) -> Iterator[Finding]:
    """Every key that SGLang has not, or means in another way."""
    if recipe.rollout.engine != "sglang":
        return
    yield from vllm_rules.hf_options("SGLang", recipe)
    for path, message, reason in _unlike(recipe):
        hint = "rollout.engine: vllm or hf"
        yield Finding(path=("rollout", *path), message=message, reason=reason, hint=hint, reads=(("rollout", "engine"),), at_key=True)


def _unlike(recipe: Recipe) -> Iterator[tuple[KeyPath, str, str]]:
    """(key below `rollout`, what is wrong, why)."""
    rollout = recipe.rollout
    if rollout.bad_words:
        yield ("bad_words",), "is not sampled by the engine `sglang`", "SGLang has no banned words"
    if rollout.penalties.repetition != 1.0:
        why = "SGLang counts the tokens of the completion alone, the other engines those of the prompt too"
        yield ("penalties", "repetition"), "must be 1.0 for the engine `sglang`", why
    for name in ("presence", "frequency"):
        if abs(getattr(rollout.penalties, name)) > PENALTY_LIMIT:
            yield ("penalties", name), "must be within -2 and 2 for the engine `sglang`", "SGLang takes no others"
    if rollout.ignore_eos and (rollout.stop_token_ids or any(label.stop_token_ids for label in rollout.by_label.values())):
        yield ("ignore_eos",), "must be false with `stop_token_ids` for the engine `sglang`", "SGLang then ignores all ids that end a completion"
    for path, stops, least in _ends(recipe):
        if len(stops) > MOST_STOPS:
            yield (*path, "stop"), f"is at most {MOST_STOPS} strings for the engine `sglang`, got {len(stops)}", "SGLang takes no more"
        if stops and least:
            why = "SGLang ends a completion at a string even before its shortest length"
            yield (*path, "stop"), "does not go with `min_new_tokens` for the engine `sglang`", why


def _ends(recipe: Recipe) -> Iterator[tuple[KeyPath, tuple[str, ...], int]]:
    """(where, stop strings, shortest length) of the rollout, its labels, and what an evaluation set has of its own."""
    rollout = recipe.rollout
    yield (), rollout.stop, max([rollout.min_new_tokens, *(source.sampling.min_new_tokens or 0 for source in recipe.data.eval.values())])
    for label, own in rollout.by_label.items():
        least = rollout.min_new_tokens if own.min_new_tokens is None else own.min_new_tokens
        if own.stop is not None or own.min_new_tokens is not None:
            yield ("by_label", label), rollout.stop if own.stop is None else own.stop, least


Row = tuple[tuple[str, ...], str, Callable[[Recipe, KnownRules | None], Iterator[Finding]]]
# How to add one: a small function above and a line here.
ROWS: dict[str, Row] = {
    "sglang-arguments": (("rollout.sglang.options",), "What has a key of its own, or follows from one, is no option.", own_arguments),
    "sglang-check": (
        ("rollout.sglang.check_weights", "rollout.sglang.tensor_parallel"),
        "Weights are compared where an engine holds them whole and as they are.",
        checkable_weights,
    ),
    "sglang-sampling": (
        ("rollout.engine", "rollout.bad_words", "rollout.penalties", "rollout.ignore_eos", "rollout.stop", "rollout.hf.options"),
        "What SGLang samples in another way than the other engines is left to them.",
        sampling,
    ),
    "sglang-together": (
        ("rollout.sglang.tensor_parallel", "rollout.by_label", "rollout.over_sample", "rollout.partial"),
        "Ranks of one engine call it alike.",
        together,
    ),
}
"""Code -> keys it concerns, the rule in one sentence, its check."""
