"""An SGLang engine for a rank, from the plan: its arguments, and which rank of several starts it.

Leaves out the folder it reads its configuration from (`engine_folder`), starting, sampling and pushing (`engines.sglang`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rftcli.algo.keyed import key64
from rftcli.engines.sglang_settings import needs_tokenizer
from rftcli.engines.table import sampler_class
from rftcli.models.load import DTYPES
from rftcli.plan.plan import Plan
from rftcli.plan.plan_engine import SglangPlan
from rftcli.protocols import Sampler, World
from rftcli.runtime.emit import Emitter
from rftcli.runtime.engine_folder import config_folder
from rftcli.runtime.rundir import AttemptDir

SPARE_TOKENS = 8
"""That SGLang wants behind the longest sequence: it cuts the length of completions to leave two free, and the prompt's to leave seven."""
CPU_SHARE = 0.8
"""Of the memory that is free, at most: on a CPU the number of tokens is the limit."""
MOST_SHARE = 0.95
SHARE_STEP = 0.02
"""On top of weights and cache: SGLang measures what is free once more after loading."""
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
"""Without it SGLang looks for a GPU."""
ON_CPU: dict[str, Any] = {"attention_backend": "torch_native", "sampling_backend": "pytorch"}
"""What needs no kernels of a GPU; a CPU build with its own is told by `rollout.sglang.options`."""


def make_sglang(
    plan: Plan, model: Any, tokenizer: Any, ends: Sequence[int], world: World, device: torch.device, emit: Emitter, attempt: AttemptDir, *,
    first_step: int, newest: Callable[[], int] | None = None,
) -> Sampler:  # fmt: skip
    """`engine_folder.make_own_engine`. Of ranks that share an engine the first starts it; nothing is kept with the `attempt`."""
    del attempt
    sglang = plan.rollout.sglang
    assert sglang is not None
    if device.type == "cpu":
        os.environ.setdefault(CPU_ENGINE, "1")
    cls: Any = sampler_class("sglang")
    from rftcli.engines.sglang_start import start

    running = None
    if world.rank % sglang.tensor_parallel == 0:
        reads_text = reads(plan)
        made = None if plan.policy.trust_remote_code else config_folder(model, tokenizer if reads_text else None, plan.policy.dtype)
        asked = arguments(plan, sglang, world, device, first_step=first_step, reads_text=reads_text)
        running = start(plan.policy.path if made is None else str(made), asked, sglang.options, device)
        emit.log(f"sglang: {'a seed for every completion' if running.seeded else 'one generator, seeded at the start'}; {sglang.memory}")
    world.barrier("sglang")
    return cls(
        running, model, tokenizer, ends,
        world=world, tensor_parallel=sglang.tensor_parallel, sleep=sglang.sleep, check=sglang.check_weights,
        checkable=sglang.tensor_parallel == 1 and "quantization" not in sglang.options, dtype=DTYPES[plan.policy.dtype], device=device, newest=newest,
    )  # fmt: skip


def reads(plan: Plan) -> bool:
    """Whether the engine has to read or write text, in any of its calls."""
    rollout = plan.rollout
    labels = rollout.by_label.values()
    stops = [rollout.stop, *(label.stop for label in labels)]
    least = [own.min_new_tokens for own in (rollout, *labels, *plan.eval.sampling.values())]
    return needs_tokenizer(stop=any(stops), structured=rollout.structured, least=least)


def arguments(plan: Plan, sglang: SglangPlan, world: World, device: torch.device, *, first_step: int, reads_text: bool) -> dict[str, Any]:
    """Of `sglang.Engine`, as far as the plan owns them."""
    number = world.rank // sglang.tensor_parallel
    longest = sglang.max_model_tokens + SPARE_TOKENS
    found: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": plan.policy.dtype,
        "trust_remote_code": plan.policy.trust_remote_code,
        "device": device.type,
        "base_gpu_id": device.index or 0,
        "tp_size": sglang.tensor_parallel,
        "context_length": longest,
        "max_running_requests": sglang.max_sequences,
        "mem_fraction_static": _share(sglang, device),
        "disable_cuda_graph": not sglang.graphs,
        "skip_tokenizer_init": not reads_text,
        "schedule_policy": "lpm",  # rows of a prompt after the first find it in the cache
        "enable_deterministic_inference": sglang.seeds == "request",
        "random_seed": key64("sglang engine", plan.seed, number, first_step) % 2**31,
    }
    if sglang.cache_tokens is not None:
        found["max_total_tokens"] = max(sglang.cache_tokens, longest)
    if sglang.graphs:
        found["cuda_graph_max_bs"] = sglang.max_sequences
    if sglang.sleep:
        found |= {"enable_memory_saver": True, "enable_weights_cpu_backup": sglang.sleep == 1}
    return found | (ON_CPU if device.type == "cpu" else {})


def _share(sglang: SglangPlan, device: torch.device) -> float:
    """For weights and cache, of what is free when the engine starts, which is how SGLang counts."""
    if device.type == "cpu":
        return CPU_SHARE
    free, total = torch.cuda.mem_get_info(device)
    if sglang.weight_bytes is None or sglang.cache_bytes is None:
        static = (sglang.memory_share or MOST_SHARE) * total
    else:
        static = sglang.weight_bytes + sglang.cache_bytes
    return round(min(MOST_SHARE, static / free + SHARE_STEP), 3)
