"""The models of a plan made real on one rank: tokenizer, policy with its adapter, a rollout's replica, the reference, the running mean.

What it leaves out: training them (`learner`), and everything that is no model (`build`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rftcli.builtin import builtin_path
from rftcli.errors import ResumeError
from rftcli.models import lora
from rftcli.models.freeze import freeze
from rftcli.models.kernels import switches
from rftcli.models.load import load_causal_lm, load_tokenizer, quantisation
from rftcli.models.policy import CausalPolicy, Head
from rftcli.models.scores import kernels_work
from rftcli.models.vocabulary import add_tokens, check_ids, grow_embeddings
from rftcli.plan.plan import LearnerPlan, ModelPlan, Plan
from rftcli.protocols import Reference, World
from rftcli.runtime.ema import RunningMean
from rftcli.runtime.emit import Emitter
from rftcli.runtime.learner import DeepSpeedLearner
from rftcli.runtime.reference import AdapterReference, ModelReference, ShardedReference
from rftcli.runtime.sharding import partitioned


def make_tokenizer(plan: ModelPlan) -> Any:
    """The tokenizer of a model plan, with the tokens it adds."""
    path, revision = (plan.path, plan.revision) if plan.tokenizer is None else (plan.tokenizer, plan.tokenizer_revision)
    if path.startswith("builtin:"):
        path = str(builtin_path(path.removeprefix("builtin:")))
    tokenizer = load_tokenizer(path, trust_remote_code=plan.trust_remote_code, revision=revision, options=plan.tokenizer_options)
    add_tokens(tokenizer, plan.add_tokens)
    return tokenizer


def load_model(plan: ModelPlan, device: torch.device, path: str | None = None, *, quantised: Any = None) -> Any:
    """The causal LM of a model plan, in evaluation mode, on `device`; `path` takes its place (a checkpoint's policy folder)."""
    return load_causal_lm(
        path or plan.path,
        dtype=plan.dtype,
        attention=plan.attention,
        dropout=plan.dropout,
        options=plan.options,
        trust_remote_code=plan.trust_remote_code,
        device=device,
        revision=plan.revision if path is None else None,
        quantised=quantised,
        kernels=plan.kernels,
    )


def start_device(plan: LearnerPlan, device: torch.device) -> torch.device:
    """Where a model that is trained is loaded: on `device`, or where no device holds it whole."""
    return torch.device("cpu") if plan.from_host else device


def load_whole(plan: ModelPlan, device: torch.device, tokenizer: Any) -> Any:
    """As `load_model`, with embeddings for every token of the tokenizer: what a policy starts as, without adapter and not quantised."""
    return fitted(load_model(plan, device), plan, tokenizer)


def make_policy(
    plan: ModelPlan, device: torch.device, tokenizer: Any, emit: Emitter, weights: Path | None = None
) -> tuple[Any, lora.Adapter | None]:
    """(the model that is trained, its adapter if it has one); what is not trained is frozen. `weights`: a policy folder to go on from instead of the
    plan's model. Raises ResumeError where that would lose the reference."""
    if weights is not None and plan.lora is not None:
        raise ResumeError(
            f"{weights.parent} holds no trainer state, and a merged policy does not say what its adapter was",
            hint=f"start a new run with models.policy.lora.start_from: {weights.with_name('adapter')}",
        )
    bits = plan.quantise
    few = None if bits is None else quantisation(bits=bits.bits, kind=bits.kind, nested=bits.nested, dtype=plan.dtype)
    model = fitted(load_model(plan, device, None if weights is None else str(weights), quantised=few), plan, tokenizer)
    if plan.kernels != "none":
        emit.log(f"kernels of {plan.kernels}: {', '.join(name for name, on in switches(model.config).items() if on)}")
    if plan.freeze:
        tensors, parameters = freeze(model, plan.freeze)
        emit.log(f"frozen: {tensors} tensors, {parameters:,} parameters ({', '.join(plan.freeze)})")
    if plan.lora is None:
        return model, None
    section = plan.lora
    adapter = lora.attach(
        model,
        rank=section.rank,
        alpha=section.alpha,
        dropout=section.dropout,
        targets=section.targets[0] if section.pattern or section.targets == ("all-linear",) else section.targets,
        save_also=section.save_also,
        options=section.options,
        start_from=section.start_from,
        base_name=plan.given if plan.given.count("/") == 1 and plan.revision else plan.path,
        copy_for_reference=section.start_from is not None,
    )
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    emit.log(f"LoRA: {trained:,} trained parameters")
    return model, adapter


def fused_scores(world: World, device: torch.device, emit: Emitter) -> bool:
    """Whether the kernels that read scores run on all ranks. Collective: how often a sharded head is called depends on it."""
    why = next((reason for reason in world.gather(kernels_work(device)) if reason is not None), None)
    if why is not None and device.type == "cuda":
        emit.warn("plain_scores", f"scores are read by plain torch, which takes longer: the kernels do not run here ({why})")
    return why is None


def make_reference(
    plan: Plan, learner: DeepSpeedLearner, world: World, device: torch.device, tokenizer: Any, *, head: Head, fused: bool
) -> Reference | None:
    """The plan's reference; None where it needs none. Collective where weights are sharded."""
    if plan.reference is None:
        return None
    use = plan.reference_use
    assert use is not None, "a plan with a reference says how it is held"
    if use.kind != "model":
        assert learner.adapter is not None
        return AdapterReference(learner, learner.adapter)
    model = load_whole(plan.reference, torch.device("cpu") if use.offload or use.shard else device, tokenizer)
    if use.shard:
        return ShardedReference(partitioned(CausalPolicy(model, head=head, fused=fused).requires_grad_(False), plan.reference.dtype, device))
    reference = ModelReference(
        CausalPolicy(model, head=head, fused=fused),
        device,
        offload=use.offload,
        refresh_every=use.refresh_every,
        mix=use.mix,
        writes=world.rank == 0,
    )
    if plan.reference.lora is not None:
        reference.take(learner.weights())  # what the policy starts as: quantised weights unpacked, an earlier adapter merged in
    if use.refresh_every:
        learner.companions["reference"] = reference
    return reference


def keep_mean(plan: ModelPlan, learner: DeepSpeedLearner, world: World) -> None:
    """Start the running mean of the plan, if it has one."""
    if plan.ema is not None:
        learner.companions["ema"] = RunningMean(learner, decay=plan.ema.decay, rank=world.rank)


def fitted(model: Any, plan: ModelPlan, tokenizer: Any) -> Any:
    """The model with embeddings for every token that its plan adds. UsageError where a tokenizer of its own does not fit."""
    if plan.add_tokens:
        grow_embeddings(model, tokenizer)
    elif plan.tokenizer is not None:
        check_ids(model, tokenizer)
    return model
