"""A vLLM engine for a rank, from the plan: the folder it reads its configuration from, its arguments, its environment.

It is started with random weights, so that nothing is read twice, and GGUF files, adapters, quantised weights and grown vocabularies need no special
way: what the trainer holds is pushed before the first rollout. Leaves out sampling and pushing (`engines.vllm`).
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from rftcli.algo.keyed import key64
from rftcli.engines.table import sampler_class
from rftcli.engines.vllm_settings import needs_tokenizer
from rftcli.models.load import DTYPES
from rftcli.models.lora import Adapter
from rftcli.plan.plan import Plan
from rftcli.plan.plan_engine import VllmPlan
from rftcli.probe.cache import user_cache_dir
from rftcli.protocols import Sampler, World
from rftcli.runtime.emit import Emitter
from rftcli.runtime.rundir import AttemptDir
from rftcli.runtime.vllm_apart import Place, make_apart

ALWAYS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine core runs in this process: weights are written into its model."""
UNLESS_SET = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are the same ones
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles at the first start, and takes no seeds of rows
}


def make_vllm(
    plan: Plan, model: Any, tokenizer: Any, ends: Sequence[int], world: World, device: torch.device, emit: Emitter, attempt: AttemptDir,
    newest: Callable[[], int] | None = None,
) -> Sampler:  # fmt: skip
    """The engine of this rank, without weights yet. Collective where ranks share one, and where it is in another process. `newest`: the trainer's
    version."""
    vllm = plan.rollout.vllm
    assert vllm is not None
    if vllm.process != "inside":
        # the server's own endpoints write text, so it needs the tokenizer
        folder = plan.policy.path if plan.policy.trust_remote_code else str(config_folder(model, tokenizer, plan.policy.dtype))
        place = Place(plan=plan, world=world, device=device, attempt=attempt, emit=emit, folder=folder)
        return make_apart(place, model, tokenizer, ends, UNLESS_SET, newest)
    os.environ.update(ALWAYS)
    for name, value in UNLESS_SET.items():
        os.environ.setdefault(name, value)
    reads_text = needs_tokenizer(stop=plan.rollout.stop, bad_words=plan.rollout.bad_words, structured=plan.rollout.structured)
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
    )  # fmt: skip


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
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # the cache has its own size; vLLM refuses to start where less than this share is free
        found["gpu_memory_utilization"] = max(0.01, min(vllm.memory_share or 1.0, int(free / total * 100) / 100 - 0.01))
    return found


def config_folder(model: Any, tokenizer: Any | None, dtype: str) -> Path:
    """A folder with the model's configuration, and the tokenizer if one is given, but no weights. It is named by what is in it: vLLM keeps what it
    has compiled by the folder's name."""
    place = user_cache_dir().with_name("engines")
    place.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=place))
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what is pushed is unpacked
    config.architectures = [type(model).__name__]
    config.dtype = DTYPES[dtype]
    config.save_pretrained(fresh)
    if tokenizer is not None:
        tokenizer.save_pretrained(fresh)
    digest = hashlib.sha256()
    for path in sorted(fresh.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(fresh)}\0".encode() + path.read_bytes())
    target = place / digest.hexdigest()[:32]
    try:
        fresh.rename(target)
    except OSError:  # another rank, or an earlier run, was first
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def whole_weights(model: Any, adapter: Adapter | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model that no trainer has sharded, adapter merged in."""
    if adapter is not None:
        yield from adapter.merged(lambda parameters: nullcontext())
        return
    for name, parameter in model.named_parameters():
        yield name, parameter.data
