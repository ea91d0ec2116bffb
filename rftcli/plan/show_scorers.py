"""Lines of a plan about its scorers: what each is, where it lies, what it holds of a rank's memory. Pure."""

from __future__ import annotations

from rftcli.plan.compile_scorers import same_checkpoint, weights_gib
from rftcli.plan.plan import Plan
from rftcli.redact import redacted_text
from rftcli.rewards.scorers.spec import ReadSpec, ScorerSpec, WeightsSpec


def scorer_rows(plan: Plan) -> list[tuple[str, str]]:
    """(name, text), one a scorer; a checkpoint under a second name is said to be shared."""
    rows, seen = [], {}
    for spec in plan.scorers:
        parts = [_what(spec)]
        if spec.weights is not None:
            key = same_checkpoint(spec)
            parts.append(f"shares the weights of {seen[key]}" if key in seen else _memory(spec.weights, plan.world.ranks))
            seen.setdefault(key, spec.name)
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
    if spec.service is not None:
        service = spec.service
        limit = "" if service.per_minute is None else f", {service.per_minute:g} a minute"
        urls = redacted_text(", ".join(service.urls))
        return f"{spec.kind} at {urls}{read}, {service.concurrency} requests at a time{limit}"
    assert spec.weights is not None
    head = f", head {spec.head}" if spec.read is None else read
    return f"{spec.kind}, {spec.weights.given}, {spec.weights.dtype}{head}"


def _read(read: ReadSpec) -> str:
    if read.token is not None:
        return f"probability of `{read.token}`" + (f" against {', '.join(read.against)}" if read.against else "")
    return f"number at `{read.json}`" if read.json is not None else f"number found by `{read.regex}`"


def _memory(weights: WeightsSpec, ranks: int) -> str:
    where = "on the CPU between uses" if weights.offload else f"partitioned over {ranks} ranks" if weights.sharded else ""
    size = f"{weights_gib(weights, ranks):.2f} GiB a rank" if weights.parameters else ""
    return ", ".join(filter(None, (size, where)))
