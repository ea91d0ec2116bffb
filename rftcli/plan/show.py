"""A plan as text for a person: what runs, on what, and why it was decided so. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftcli.plan import memory
from rftcli.plan.plan import Plan, plan_hash


def plan_text(plan: Plan) -> str:
    parameters, rollout, learner = plan.policy.parameters, plan.rollout, plan.learner
    rows = [
        ("plan", f"{plan.name}  {plan_hash(plan)}"),
        ("run", f"{plan.steps} steps, seed {plan.seed}"),
        ("ranks", f"{plan.world.ranks} x {plan.world.device} ({plan.world.backend}){_nodes(plan)}, {plan.world.threads_per_rank} threads each"),
        ("policy", f"{plan.policy.given}, {_count(parameters)} parameters, {plan.policy.dtype}, attention {plan.policy.attention}"),
        ("reference", "none needed" if plan.reference is None else plan.reference.given),
        ("batch", plan.batch.equation),
        ("layout", plan.batch.layout),
        ("old log-probs", plan.batch.needs_prepass or "from the update's own forward pass: one update per rollout"),
        ("rollout", f"{rollout.engine}, {rollout.batch_rows} rows a pass, {rollout.max_new_tokens} new tokens, temperature {rollout.temperature}"),
        ("advantage", f"{plan.advantage.kind} {_options(plan.advantage.options)}"),
        ("loss", f"{plan.loss.kind} {_options(plan.loss.options)}, {plan.loss.aggregate}"),
        ("KL", f"{plan.loss.kl_coefficient} x {plan.loss.kl_estimator} in the loss" if plan.loss.kl_coefficient else "off"),
        ("optimizer", f"{learner.kind}, lr {learner.lr} {learner.schedule}, warm-up {learner.warmup_updates} updates"),
        ("gradients", "not clipped" if learner.max_grad_norm is None else f"norm at most {learner.max_grad_norm:g}"),
        ("ZeRO", f"stage {learner.zero_stage}{_memory(plan)}"),
        ("data", ", ".join(f"{spec.name} ({spec.path or spec.python})" for spec in plan.data.train)),
        ("evaluation", ", ".join(spec.name for spec in plan.data.eval) or "none"),
    ]
    for label, parts in plan.rewards.labels.items():
        rows.append((f"reward {label}", " + ".join(f"{part.weight:g} x {part.name}" for part in parts)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, *(f"note: {text}" for text in plan.notes)])


def _nodes(plan: Plan) -> str:
    nodes = plan.world.nodes
    return "" if nodes == 1 else f" on {nodes} nodes of {plan.world.ranks // nodes}"


def _count(parameters: int | None) -> str:
    if parameters is None:
        return "an unknown number of"
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)


def _memory(plan: Plan) -> str:
    if plan.policy.parameters is None:
        return ""
    need = memory.training_bytes(plan.policy.parameters, plan.policy.dtype, plan.learner.zero_stage, plan.world.ranks) / memory.GIB
    return f", {need:.2f} GiB a rank for weights, gradients and optimizer"
