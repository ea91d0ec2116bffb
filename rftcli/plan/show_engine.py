"""Rows of a plan's table about vLLM engines in other processes than the ranks."""

from __future__ import annotations

from rftcli.plan.plan import Plan
from rftcli.plan.plan_engine import ServerPlan, VllmPlan
from rftcli.redact import redacted_text

WAYS = {"auto": "by broadcast where both sides have GPUs, else by files", "nccl": "by broadcast", "files": "by files"}


def apart_rows(plan: Plan, vllm: VllmPlan) -> list[tuple[str, str]]:
    """Where each engine is, what memory it has, how weights reach it."""
    graphs = f"graphs up to {vllm.max_sequences} rows, " if vllm.graphs and (vllm.server is None or vllm.server.start is not None) else ""
    checked = "compared after every update" if vllm.check_weights else "compared after the first push"
    merged = ", adapter merged" if plan.policy.lora is not None else ""
    if vllm.server is not None:
        where, how = _servers(vllm, vllm.server), WAYS[vllm.server.weights]
        rest = ""
    else:
        each = f"one over every {vllm.tensor_parallel} ranks" if vllm.tensor_parallel > 1 else "one for every rank"
        where = f"vLLM in processes beside the ranks, {each}, on the same devices"
        how = "by CUDA IPC" if plan.world.device == "cuda" else "through shared memory"
        rest = f"; sleeps at level {vllm.sleep} while the policy is trained" if vllm.sleep else "; stays awake"
    return [
        ("engine", f"{where}, {graphs}at most {vllm.max_model_tokens} tokens a sequence"),
        ("engine memory", f"{vllm.memory}{rest}"),
        ("engine weights", f"{how} after every update{merged}, {checked}"),
    ]


def _servers(vllm: VllmPlan, server: ServerPlan) -> str:
    start = server.start
    if start is None:
        return f"vLLM at {', '.join(redacted_text(url) for url in server.urls)}"
    devices = f"GPUs {', '.join(str(gpu) for gpu in start.gpus)}" if start.gpus else "the CPU"
    each = f" of {vllm.tensor_parallel} GPUs each" if vllm.tensor_parallel > 1 else ""
    return f"{start.servers} vLLM server{'s' if start.servers > 1 else ''}{each} on {devices} of the first rank's machine, started by the run"
