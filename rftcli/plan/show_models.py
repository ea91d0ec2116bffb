"""Lines of a plan about its models: adapter, quantised weights, what is frozen, the running mean, the reference. Pure."""

from __future__ import annotations

from rftcli.plan.plan import ModelPlan, Plan, TeacherPlan
from rftcli.plan.plan_models import ReferencePlan
from rftcli.plan.show_scorers import started_text


def model_rows(plan: Plan) -> list[tuple[str, str]]:
    """(name, text); only what the plan has, and always the reference."""
    policy = plan.policy
    rows = []
    if policy.revision is not None:
        rows.append(("revision", policy.revision))
    if policy.tokenizer is not None or policy.add_tokens:
        added = f"{len(policy.add_tokens)} tokens added" if policy.add_tokens else ""
        rows.append(("tokenizer", ", ".join(filter(None, (policy.tokenizer or policy.given, added)))))
    if policy.lora is not None:
        rows.append(("LoRA", _lora(policy)))
    if policy.quantise is not None:
        bits = policy.quantise
        kind = f" ({bits.kind}{', nested scales' if bits.nested else ''})" if bits.bits == 4 else ""
        rows.append(("quantised", f"frozen weights in {bits.bits} bits{kind}, exported in {policy.dtype}"))
    if policy.freeze:
        rows.append(("frozen", ", ".join(policy.freeze)))
    if policy.ema is not None:
        uses = [text for asked, text in ((policy.ema.evaluate, "evaluated too"), (policy.ema.export, "exported to final/")) if asked]
        rows.append(("running mean", ", ".join([f"decay {policy.ema.decay:g} an update", *uses])))
    rows.append(("reference", _reference(plan.reference, plan.reference_use)))
    if plan.teacher is not None:
        rows.append(("teacher", _teacher(plan.teacher)))
    return rows


def _lora(policy: ModelPlan) -> str:
    lora = policy.lora
    assert lora is not None
    dropout = f", dropout {lora.dropout:g}" if lora.dropout else ""
    if lora.start_from is not None:
        return f"goes on from {lora.start_from}{dropout}"
    options = "".join(f", {name} {value}" for name, value in lora.options.items())
    whole = f", whole: {', '.join(lora.save_also)}" if lora.save_also else ""
    return f"rank {lora.rank}, alpha {lora.alpha:g}{dropout}, on {', '.join(lora.targets)}{whole}{options}"


def _reference(model: ModelPlan | None, use: ReferencePlan | None) -> str:
    if model is None:
        return "none needed"
    if use is None:
        return model.given
    held = {"model": model.given, "adapter_off": f"{model.given}, adapter off", "adapter_copy": f"{model.given}, frozen copy of the adapter"}
    refresh = f", every {use.refresh_every} steps {use.mix:g} of the policy mixed in" if use.refresh_every else ""
    return held[use.kind] + refresh + (", on the CPU between uses" if use.offload else ", partitioned over the ranks" if use.shard else "")


def _teacher(teacher: TeacherPlan) -> str:
    if teacher.start is not None:
        return f"{teacher.start.given}, {teacher.start.dtype}, {started_text(teacher.start)}"
    if teacher.server is not None:
        return f"{teacher.server.model or 'the model'} at {teacher.server.url} ({teacher.server.api})"
    assert teacher.model is not None
    return f"{teacher.model.given}, {teacher.model.dtype}" + (", on the CPU between uses" if teacher.offload else "")
