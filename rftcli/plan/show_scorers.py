"""Lines of a plan about its scorers: what each is, where it lies, what it holds of a rank's memory. Pure."""

from __future__ import annotations

from rftcli.plan.compile_scorers import same_checkpoint, weights_gib
from rftcli.plan.memory import GIB
from rftcli.plan.plan import Plan
from rftcli.redact import redacted_text
from rftcli.rewards.scorers.spec import ReadSpec, ScorerSpec, StartSpec, WeightsSpec


def scorer_rows(plan: Plan) -> list[tuple[str, str]]:
    """(name, text), one a scorer; a checkpoint under a second name is said to be shared."""
    rows, seen, started = [], {}, {}
    for spec in plan.scorers:
        parts = [_what(spec)]
        if spec.weights is not None:
            key = same_checkpoint(spec)
            parts.append(f"shares the weights of {seen[key]}" if key in seen else _memory(spec.weights, plan.world.ranks))
            seen.setdefault(key, spec.name)
        elif spec.start is not None:
            shared = next((name for name, start in started.items() if start == spec.start), None)
            parts.append(started_text(spec.start) if shared is None else f"shares the server of {shared}")
            started.setdefault(spec.name, spec.start)
        elif spec.memory_gib:
            parts.append(f"{spec.memory_gib:.2f} GiB a rank")
        if spec.cache:
            parts.append("cached")
        rows.append((f"scorer {spec.name}", ", ".join(filter(None, parts))))
    return rows


def _what(spec: ScorerSpec) -> str:
    if spec.target is not None:
        return f"python, {spec.target}"
    read = "" if spec.read is None else f", {_read(spec.read)}"
    if spec.service is not None and spec.weights is None:
        service = spec.service
        limit = "" if service.per_minute is None else f", {service.per_minute:g} a minute"
        urls = redacted_text(", ".join(service.urls))
        where = f" at {urls}" if spec.start is None else f", {spec.start.given}, {spec.start.dtype}"
        return f"{spec.kind}{where}{read}, {service.concurrency} requests at a time{limit}"
    assert spec.weights is not None
    head = f", head {spec.head}" if spec.read is None else read
    beside = ", vLLM in a process beside each rank" if spec.start is not None else ""
    return f"{spec.kind}, {spec.weights.given}, {spec.weights.dtype}{head}{beside}"


def started_text(start: StartSpec) -> str:
    """Whose GPUs are whose; memory of each."""
    many = f"{start.servers} vLLM servers" if start.servers > 1 else "a vLLM server"
    if not start.gpus:
        size = f", {start.cache_bytes / GIB:.2f} GiB of cache" if start.cache_bytes else ""
        return f"{many} of its own on the CPU of the first rank's machine, started by the run{size}"
    each = f" of {start.tensor_parallel} GPUs each" if start.servers > 1 and start.tensor_parallel > 1 else ""
    gpus = ", ".join(str(gpu) for gpu in start.gpus)
    plural = "s" if len(start.gpus) > 1 else ""
    return f"{many}{each} of its own on GPU{plural} {gpus} of the first rank's machine, started by the run, {start.memory_share:.0%} of the memory"


def _read(read: ReadSpec) -> str:
    if read.token is not None:
        return f"probability of `{read.token}`" + (f" against {', '.join(read.against)}" if read.against else "")
    return f"number at `{read.json}`" if read.json is not None else f"number found by `{read.regex}`"


def _memory(weights: WeightsSpec, ranks: int) -> str:
    where = "on the CPU between uses" if weights.offload else f"partitioned over {ranks} ranks" if weights.sharded else ""
    size = f"{weights_gib(weights, ranks):.2f} GiB a rank" if weights.parameters else ""
    return ", ".join(filter(None, (size, where)))
