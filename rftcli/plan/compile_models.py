"""The models of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts, ModelFacts
from rftcli.plan.plan import ModelPlan, WorldPlan
from rftcli.plan.plan_models import EmaPlan, LoraPlan, QuantisePlan, ReferencePlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe

CHECKPOINTING_FROM_PARAMETERS = 2_000_000_000
"""Above this, activations of a micro-batch outweigh a third more compute, where they cannot be computed from the model's files."""


REFERENCE_SHARE = 0.25
"""Share of a GPU that a reference may hold for good; a larger one waits in CPU memory. Only where the policy's widths are not known."""
PACKING = ("varlen", "flash_2", "flash_3")
"""Kinds of attention that make packed rows cheaper than padded ones."""
PREFIXES = ("model.", "transformer.")
"""What files of weights may have, or lack, in front of the names that the loaded model has."""


def model_plan(recipe: Recipe, facts: Facts, device: str, path: str) -> ModelPlan:
    policy = recipe.models.policy
    dtype = policy.dtype if policy.dtype != "auto" else facts.machine.number_type
    checkpointing = policy.gradient_checkpointing
    if checkpointing == "auto":
        checkpointing = checkpoints_by_size(facts.model, device)
    return ModelPlan(
        path=path,
        given=policy.path,
        dtype=dtype,
        attention="sdpa" if policy.attention == "auto" else policy.attention,
        dropout=policy.dropout,
        gradient_checkpointing=bool(checkpointing),
        trust_remote_code=policy.trust_remote_code,
        options=dict(policy.options),
        parameters=facts.model.parameters,
        # a commit where the hub told it; what was asked for where nobody was asked
        revision=facts.model.revision or policy.revision,
        tokenizer=policy.tokenizer,
        tokenizer_revision=facts.tokenizer_revision,
        tokenizer_options=dict(policy.tokenizer_options),
        add_tokens=tuple(policy.add_tokens),
        freeze=tuple(policy.freeze),
        lora=_lora(recipe),
        quantise=None
        if policy.quantise is None
        else QuantisePlan(bits=policy.quantise.bits, kind=policy.quantise.kind, nested=policy.quantise.nested),
        ema=None if policy.ema is None else EmaPlan(decay=policy.ema.decay, evaluate=policy.ema.evaluate, export=policy.ema.export),
        kernels=recipe.train.kernels,
    )


def checkpoints_by_size(model: ModelFacts, device: str) -> bool:
    """Gradient checkpointing where the model's files do not tell its widths."""
    return device == "cuda" and (model.parameters or 0) >= CHECKPOINTING_FROM_PARAMETERS


def _lora(recipe: Recipe) -> LoraPlan | None:
    lora = recipe.models.policy.lora
    if lora is None:
        return None
    single = isinstance(lora.targets, str)
    return LoraPlan(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        targets=(lora.targets,) if single else tuple(lora.targets),
        pattern=single and lora.targets != "all-linear",
        save_also=tuple(lora.save_also),
        start_from=lora.start_from,
        options=dict(lora.options),
    )


def reference_plans(
    recipe: Recipe, world: WorldPlan, policy: ModelPlan, other: ModelFacts | None, notes: list[str]
) -> tuple[ModelPlan | None, ReferencePlan | None]:
    """(which model the reference is, how it is held), or twice None where nothing needs one."""
    section = recipe.models.reference
    refreshed = section.refresh.every > 0
    if recipe.algorithm.kl.coefficient == 0.0:
        if section.from_ != "policy" or refreshed or section.offload is True or section.shard is True:
            notes.append("models.reference is not loaded: algorithm.kl.coefficient is 0, so nothing needs it")
        return None, None
    # a reference of its own is loaded whole: what makes the policy trainable is not the reference's
    model = replace(policy, freeze=(), ema=None)
    if other is not None:
        model = replace(
            model, path=other.path, given=str(section.from_), parameters=None, revision=other.revision, lora=None, quantise=None, add_tokens=()
        )
    kind = "model"
    if other is None and policy.lora is not None and not refreshed:
        kind = "adapter_off" if policy.lora.start_from is None else "adapter_copy"
        without = "without its adapter" if kind == "adapter_off" else "under a frozen copy of the adapter it started from"
        notes.append(f"the reference is the policy {without}: no second copy of the model")
    elif other is None and policy.lora is not None:
        notes.append("models.reference.refresh mixes whole weights, so the reference is a second copy of the model, adapter merged in")
    offload = _offload(recipe, world, kind, notes)
    use = ReferencePlan(kind=kind, refresh_every=section.refresh.every, mix=section.refresh.mix, offload=offload, shard=section.shard is True)
    return model, use


def _offload(recipe: Recipe, world: WorldPlan, kind: str, notes: list[str]) -> bool:
    """Whether the reference waits in CPU memory."""
    asked = recipe.models.reference.offload
    if kind != "model" or world.device == "cpu":
        if asked is True:
            why = "the reference is the policy's own module" if kind != "model" else "everything is on the CPU anyway"
            notes.append(f"models.reference.offload has no effect: {why}")
        return False
    return asked is True  # `auto` has a value by now


def check_models(recipe: Recipe, facts: Facts, problems: list[PlanProblem], notes: list[str]) -> None:
    """What the model's files say about names in the recipe, and decisions that a person should see."""
    policy, shapes, machine = recipe.models.policy, facts.model.shapes, facts.machine
    if policy.dtype == "auto" and machine.gpus and not machine.has_bfloat16:
        notes.append(f"models.policy.dtype float32: {machine.gpu_name} does not compute in bfloat16")
    if policy.attention in PACKING and not facts.model.plain_attention:
        reason = "the model caps its attention scores or has sinks, which packed attention does not compute"
        message = f"`{policy.attention}` cannot be used here"
        problems.append(PlanProblem(path="models.policy.attention", message=message, reason=reason, hint="use eager"))
    if policy.ema is not None and not policy.ema.export and not policy.ema.evaluate and recipe.eval.weights == "live":
        notes.append("models.policy.ema is kept in checkpoints and used by nothing: set `evaluate`, `export` or `eval.weights: ema`")
    if policy.freeze and shapes is not None:
        frozen = _frozen(policy.freeze, shapes)
        for index, pattern in enumerate(policy.freeze):
            if not any(_matches(name, pattern) for name in shapes):
                shown = ", ".join(sorted(shapes)[:3])
                problems.append(
                    PlanProblem(path=f"models.policy.freeze[{index}]", message=f"`{pattern}` matches no parameter", hint=f"names are like {shown}")
                )
        if shapes and len(frozen) == len(shapes):
            problems.append(PlanProblem(path="models.policy.freeze", message="freezes all parameters: nothing is left to train"))
        elif frozen:
            count, whole = sum(prod(shapes[name]) for name in frozen), sum(map(prod, shapes.values()))
            notes.append(f"models.policy.freeze: {len(frozen)} of {len(shapes)} tensors are frozen, {count:,} of {whole:,} parameters")


def _frozen(patterns: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [name for name in shapes if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern could mean a stored tensor; the ranks, which have the loaded model, compare with its own names alone."""
    others = [prefix + name for prefix in PREFIXES] + [name.removeprefix(prefix) for prefix in PREFIXES]
    return any(fnmatchcase(one, pattern) for one in (name, *others))


def trained_parameters(policy: ModelPlan, model: ModelFacts) -> int | None:
    """Parameters that have gradients, as far as the files tell; None: all of them, or not known."""
    if model.shapes is None:
        return None
    if policy.lora is not None:
        matrices = [shape for shape in model.shapes.values() if len(shape) == 2]
        return sum(policy.lora.rank * sum(shape) for shape in matrices)
    frozen = _frozen(policy.freeze, model.shapes)
    return sum(map(prod, model.shapes.values())) - sum(prod(model.shapes[name]) for name in frozen) if frozen else None


def trains_in(policy: ModelPlan) -> str:
    """The number type DeepSpeed keeps trained weights in. Adapters are float32 over a base of any type: DeepSpeed would cast the whole module."""
    return policy.dtype if policy.lora is None else "float32"
