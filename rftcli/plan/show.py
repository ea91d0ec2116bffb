"""A plan as text for a person: what runs, on what, and why it was decided so. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftcli.algo.batchmath import counted
from rftcli.plan import memory
from rftcli.plan.plan import BatchPlan, LearnerPlan, ModelPlan, Plan, RolloutPlan, plan_hash
from rftcli.plan.show_engine import apart_rows
from rftcli.plan.show_memory import memory_lines
from rftcli.plan.show_models import model_rows
from rftcli.plan.show_sampling import sampling_rows
from rftcli.plan.show_scorers import scorer_rows


def plan_text(plan: Plan) -> str:
    parameters, rollout, learner = plan.policy.parameters, plan.rollout, plan.learner
    threads = counted(plan.world.threads_per_rank, "thread")
    rows = [
        ("plan", f"{plan.name}  {plan_hash(plan)}"),
        ("run", f"{plan.steps} steps, seed {plan.seed}"),
        ("ranks", f"{plan.world.ranks} x {plan.world.device} ({plan.world.backend}){_nodes(plan)}, {threads} each"),
        ("policy", f"{plan.policy.given}, {_count(parameters)} parameters, {plan.policy.dtype}, attention {plan.policy.attention}"),
        *model_rows(plan),
        ("batch", plan.batch.equation),
        ("layout", _layout(plan.batch, plan.world.ranks)),
        ("old log-probs", _old_logprobs(plan)),
        ("rollout", f"{rollout.engine}, {_passes(rollout)}, {rollout.max_new_tokens} new tokens, temperature {rollout.temperature}"),
        *sampling_rows(plan),
        *_engine(plan),
        ("advantage", f"{plan.advantage.kind} {_options(plan.advantage.options)}"),
        ("loss", " ".join(filter(None, (plan.loss.python or plan.loss.kind, _options(plan.loss.options)))) + f", {plan.loss.aggregate}"),
        ("KL", _kl(plan)),
        ("optimizer", f"{learner.kind}, lr {learner.lr} {learner.schedule}, warm-up {learner.warmup_updates} updates"),
        ("gradients", "not clipped" if learner.max_grad_norm is None else f"norm at most {learner.max_grad_norm:g}"),
        ("ZeRO", f"stage {learner.zero_stage}{_memory(plan.policy, learner, plan.world.ranks)}"),
        ("data", ", ".join(f"{spec.name} ({spec.path or spec.python})" for spec in plan.data.train)),
        ("evaluation", ", ".join(spec.name for spec in plan.data.eval) or "none"),
    ]
    rows += _around_the_loss(plan)
    if plan.critic is not None:
        critic, own = plan.critic.model, plan.critic.learner
        text = f"{critic.given}, lr {own.lr} {own.schedule}, value clip {plan.critic.value_clip}"
        rows.append(("critic", text + _memory(critic, own, plan.world.ranks)))
    if plan.freeze_policy_steps:
        rows.append(("policy frozen", f"for {plan.freeze_policy_steps} of {plan.steps} steps, in which only the critic learns"))
    if plan.supervised is not None:
        stream = plan.supervised
        rows.append(("supervised", f"{stream.coefficient} x {stream.data.path or stream.data.python}, {stream.rows_per_update} rows an update"))
    rows += scorer_rows(plan)
    for label, parts in plan.rewards.labels.items():
        rows.append((f"reward {label}", " + ".join(f"{part.weight:g} x {part.name}" for part in parts)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, *memory_lines(plan), *(f"note: {text}" for text in plan.notes)])


def _layout(batch: BatchPlan, ranks: int) -> str:
    shared = ", prompts shared" if batch.share_prompts else ""
    even = ", completions go to the rank that has least to do" if batch.balance and ranks > 1 else ""
    passing = ", those without advantage are left out of the update" if batch.skip_zero_advantage else ""
    return batch.layout + shared + even + passing + (f", {batch.rollouts_per_update} rollouts an update" if batch.rollouts_per_update > 1 else "")


def _old_logprobs(plan: Plan) -> str:
    if plan.loss.old == "sampler":
        return "as the engine reports them"
    return plan.batch.needs_prepass or "from the update's own forward pass: one update per rollout"


def _around_the_loss(plan: Plan) -> list[tuple[str, str]]:
    """What stands between a token's loss and the update, where it is switched on."""
    loss, rows = plan.loss, []
    found = loss.correction
    if found is not None:
        how = {"truncate": f"truncated at {found.cap:g}", "mask": f"masked by {found.gate}", "reject": "not weighed"}[found.kind]
        rejects = "" if found.reject is None else f", answers rejected by {found.reject.by}"
        rows.append(("sampler correction", f"{found.level} ratios {how}{rejects}"))
    if loss.entropy_in_loss:
        towards = "" if loss.entropy_controller is None else f", towards {loss.entropy_controller.target:g} nats a token"
        rows.append(("entropy bonus", f"{loss.entropy_coefficient:g}{towards}"))
    if loss.top_entropy_share < 1.0:
        rows.append(("policy term", f"of the {loss.top_entropy_share:.0%} of tokens with the highest entropy"))
    return rows


def _engine(plan: Plan) -> list[tuple[str, str]]:
    engine, vllm = plan.rollout.own_engine, plan.rollout.vllm
    if engine is None:
        return []
    if vllm is not None and vllm.process != "inside":
        return apart_rows(plan, vllm)
    shown = "SGLang beside" if vllm is None else f"vLLM {vllm.process}"
    together = f"each over {engine.tensor_parallel} ranks" if engine.tensor_parallel > 1 else "one in every rank"
    graphs = f"graphs up to {engine.max_sequences} rows" if engine.graphs else "no graphs"
    share = "" if engine.memory_share is None else f", {engine.memory_share:.0%} of the device"
    rest = f"sleeps at level {engine.sleep} while the policy is trained" if engine.sleep else "stays awake"
    checked = "compared after every update" if engine.check_weights else "compared after the first push"
    lora = "" if plan.policy.lora is None else ", adapter merged"
    apart = bool(lora) and vllm is not None and vllm.lora == "adapter"
    sent = "the base once, the adapter after every update" if apart else f"in place after every update{lora}"
    return [
        ("engine", f"{shown} the ranks, {together}{share}, {graphs}, at most {engine.max_model_tokens} tokens a sequence"),
        ("engine memory", f"{engine.memory}; {rest}"),
        ("engine weights", f"{sent}, {checked}"),
    ]


def _passes(rollout: RolloutPlan) -> str:
    if rollout.own_engine is not None:
        return f"at most {rollout.own_engine.max_sequences} completions at a time"
    rows = f"{_rows(rollout)} rows a pass" if rollout.batch_tokens is None else f"at most {rollout.batch_tokens} tokens a pass"
    return f"{rows}, refilled" if rollout.continuous else rows


def _rows(rollout: RolloutPlan) -> str:
    most = rollout.most_rows or rollout.batch_rows
    return f"{rollout.batch_rows}" if most == rollout.batch_rows else f"{rollout.batch_rows} (up to {most} in float32 on a CPU)"


def _nodes(plan: Plan) -> str:
    nodes = plan.world.nodes
    return "" if nodes == 1 else f" on {nodes} nodes of {plan.world.ranks // nodes}"


def _count(parameters: int | None) -> str:
    if parameters is None:
        return "an unknown number of"
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)


def _kl(plan: Plan) -> str:
    kl = plan.kl
    if kl is None:
        return "off"
    where = "in the loss" if not kl.in_reward else f"in the reward, {kl.level} level"
    moving = f", towards {kl.target} over {kl.horizon:g} completions" if kl.controller == "adaptive" else ""
    return f"{kl.coefficient} x {kl.estimator} {where}{moving}"


def _memory(model: ModelPlan, learner: LearnerPlan, ranks: int) -> str:
    if model.parameters is None or model.lora is not None or model.freeze:
        return ""  # how much of it is trained is not in the plan
    need = memory.training_bytes(model.parameters, model.dtype, learner.zero_stage, ranks, _keeping(learner)) / memory.GIB
    return f", {need:.2f} GiB a rank for weights, gradients and optimizer"


def _keeping(learner: LearnerPlan) -> memory.Keeping:
    """As the configuration says it."""
    config = learner.deepspeed
    return memory.Keeping(
        optimizer=learner.kind,
        master="bfloat16" if config["bf16"].get("bf16_master_weights_and_grads") else "float32",
        gradients="bfloat16" if config.get("data_types", {}).get("grad_accum_dtype") == "bf16" else "float32",
        offload_optimizer="offload_optimizer" in config["zero_optimization"],
        offload_parameters="offload_param" in config["zero_optimization"],
    )
