"""A vLLM engine for a rank, from the plan: the folder it reads its configuration from, its arguments, its environment.

Leaves out the folder itself (`engine_folder`), sampling and pushing (`engines.vllm`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rftcli.algo.keyed import key64
from rftcli.engines.table import sampler_class
from rftcli.engines.vllm_adapter import room_for
from rftcli.engines.vllm_settings import needs_tokenizer
from rftcli.errors import UsageError
from rftcli.models.load import DTYPES
from rftcli.plan.plan import Plan
from rftcli.plan.plan_engine import VllmPlan
from rftcli.protocols import Sampler, World
from rftcli.runtime.emit import Emitter
from rftcli.runtime.engine_folder import config_folder
from rftcli.runtime.engine_process import ON_A_CPU, UNLESS_SET
from rftcli.runtime.rundir import AttemptDir
from rftcli.runtime.vllm_apart import Place, make_apart

ALWAYS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine core runs in this process: weights are written into its model."""


def make_vllm(
    plan: Plan, model: Any, tokenizer: Any, ends: Sequence[int], world: World, device: torch.device, emit: Emitter, attempt: AttemptDir, *,
    first_step: int, newest: Callable[[], int] | None = None,
) -> Sampler:  # fmt: skip
    """`engine_folder.make_own_engine`. Its generator is seeded for each rollout, so `first_step` is not needed."""
    del first_step
    vllm = plan.rollout.vllm
    assert vllm is not None
    if vllm.process != "inside":
        # the server's own endpoints write text, so it needs the tokenizer
        folder = plan.policy.path if plan.policy.trust_remote_code else str(config_folder(model, tokenizer, plan.policy.dtype))
        place = Place(plan=plan, world=world, device=device, attempt=attempt, emit=emit, folder=folder)
        return make_apart(place, model, tokenizer, ends, UNLESS_SET, newest)
    if device.type == "cpu":
        _check_build()
    os.environ.update(ALWAYS)
    for name, value in UNLESS_SET.items():
        os.environ.setdefault(name, value)
    reads_text = reads(plan)
    folder = plan.policy.path if plan.policy.trust_remote_code else str(config_folder(model, tokenizer if reads_text else None, plan.policy.dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # vLLM looks at what is free
    cls: Any = sampler_class("vllm")
    from rftcli.engines.vllm import start

    llm, params, fields, free = start(folder, arguments(plan, vllm, world, device, reads_text=reads_text), vllm.options)
    seeded = free if vllm.seeds == "auto" else vllm.seeds == "request"
    emit.log(f"vllm: {'a seed for every completion' if seeded else 'one generator, seeded for each rollout'}; {vllm.memory}")
    return cls(
        llm, params, fields, model, tokenizer, ends,
        world=world, tensor_parallel=vllm.tensor_parallel, seeded=seeded, sleep=vllm.sleep, check=vllm.check_weights,
        checkable=vllm.tensor_parallel == 1 and "quantization" not in vllm.options, dtype=DTYPES[plan.policy.dtype], device=device, newest=newest,
        adapters=vllm.lora == "adapter" and plan.policy.lora is not None,
    )  # fmt: skip


def reads(plan: Plan) -> bool:
    """Whether the engine has to read or write text, in any of its calls."""
    rollout = plan.rollout
    stops = [text for strings in (rollout.stop, *(label.stop for label in rollout.by_label.values())) for text in strings]
    return needs_tokenizer(stop=stops, bad_words=rollout.bad_words, structured=rollout.structured)


def _check_build() -> None:
    """A vLLM for GPUs would sample on one while the training is on the CPU."""
    from rftcli.engines.vllm import cannot_be_imported

    try:
        from vllm.platforms import current_platform
    except (ImportError, OSError) as error:
        raise cannot_be_imported(error) from error
    if not current_platform.is_cpu():
        raise UsageError(
            "this run is on the CPU, and the vLLM that is installed is built for GPUs", hint="--gpus N instead of --ranks N, or rollout.engine: hf"
        )


def arguments(plan: Plan, vllm: VllmPlan, world: World, device: torch.device, *, reads_text: bool) -> dict[str, Any]:
    """Of `vllm.LLM`, as far as the plan owns them. Ranks that share an engine get the same seed, others different ones."""
    found: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": plan.policy.dtype,
        "trust_remote_code": plan.policy.trust_remote_code,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": vllm.tensor_parallel,
        "max_model_len": vllm.max_model_tokens,
        "max_num_seqs": vllm.max_sequences,
        "enable_prefix_caching": True,
        "enforce_eager": not vllm.graphs,
        "skip_tokenizer_init": not reads_text,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": key64("vllm engine", plan.seed, world.rank // vllm.tensor_parallel) % 2**31,
    }
    if vllm.cache_bytes is not None:
        found["kv_cache_memory_bytes"] = vllm.cache_bytes
    if vllm.graphs:
        found["graphs_up_to"] = vllm.max_sequences
    if vllm.sleep:
        found["enable_sleep_mode"] = True
    if vllm.lora == "adapter" and plan.policy.lora is not None:
        found |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(plan.policy.lora.rank)}
    if device.type == "cpu":
        found |= ON_A_CPU
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # the cache has its own size; vLLM refuses to start where less than this share is free
        found["gpu_memory_utilization"] = max(0.01, min(vllm.memory_share or 1.0, int(free / total * 100) / 100 - 0.01))
    return found
