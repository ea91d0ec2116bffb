"""Number types, offloading and optimizers against the machine, the policy and the ZeRO stage: what goes together, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan import memory
from rftcli.plan.compile_models import trains_in
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.plan import LearnerPlan, ModelPlan, WorldPlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def keeping(recipe: Recipe) -> memory.Keeping:
    train = recipe.train
    return memory.Keeping(
        optimizer=train.optimizer.kind,
        master=train.precision.master,
        gradients=train.precision.gradients,
        offload_optimizer=train.offload.optimizer != "none",
        offload_parameters=train.offload.parameters != "none",
    )


def stages_allowed(recipe: Recipe, world: WorldPlan, policy: ModelPlan) -> tuple[int, ...]:
    """ZeRO stages that the plan may choose from, ascending. A policy in bfloat16 starts at stage 1: float32 master weights are kept from there on.
    One rank has nobody to share with."""
    train = recipe.train
    if train.optimizer.kind == "muon":
        return (0,)
    if train.offload.parameters != "none":
        return (3,)
    lowest = 1 if trains_in(policy) == "bfloat16" or train.offload.optimizer != "none" else 0
    highest = 3 if policy.quantise is None else 2
    return tuple(range(lowest, highest + 1)) if world.ranks > 1 else (lowest,)


def check_update(recipe: Recipe, world: WorldPlan, policy: ModelPlan, learner: LearnerPlan | None, problems: list[PlanProblem]) -> None:
    train = recipe.train
    critic = recipe.models.critic
    kinds = {"train.optimizer": train.optimizer.kind} | ({} if critic is None else {"models.critic.optimizer": critic.optimizer.kind})
    for place, kind in kinds.items():
        if kind != "adamw_8bit" or world.device != "cpu":
            continue
        problems.append(
            PlanProblem(
                path=f"{place}.kind",
                message="`adamw_8bit` needs a GPU, and this run is on a CPU",
                reason="its fast kernels are for CUDA, and on a CPU the moments are small beside the machine's memory",
                hint=f"use `{place}.kind: adamw`",
            )
        )
    if train.optimizer.kind == "muon" and trains_in(policy) == "bfloat16":
        problems.append(
            PlanProblem(
                path="train.optimizer.kind",
                message="`muon` needs a policy in float32",
                reason="bfloat16 needs ZeRO stage 1 for its master weights, and ZeRO cuts the matrices that muon needs whole",
                hint="set `models.policy.dtype: float32`, or use adamw",
            )
        )
    if trains_in(policy) == "float32":
        what = "a policy in float32" if policy.lora is None else "an adapter, which is trained in float32"
        for name, value in train.precision.model_dump().items():
            if value == "bfloat16":
                problems.append(
                    PlanProblem(
                        path=f"train.precision.{name}",
                        message=f"must be float32 for {what}",
                        hint="for a policy in bfloat16 set `models.policy.dtype: bfloat16`" if policy.lora is None else "leave the key out",
                    )
                )
    if train.compile and learner is not None and learner.zero_stage == 3:
        problems.append(
            PlanProblem(
                path="train.compile",
                message="must be false under ZeRO stage 3, which the plan chose",
                reason="it gathers each layer's weights in hooks, at which a compiled graph would break",
                hint="set `train.deepspeed.zero_stage: 2` if the memory allows",
            )
        )


def update_notes(recipe: Recipe, world: WorldPlan) -> list[str]:
    """What a person should know before they start."""
    train = recipe.train
    notes = []
    if train.precision.master == "bfloat16":
        notes.append("train.precision.master bfloat16: changes of a weight by less than about 1/256 of it are lost; a small lr trains little")
    if world.device == "cpu" and "cpu" in (train.offload.optimizer, train.offload.parameters):
        notes.append("train.offload saves nothing on a CPU: there is one memory")
    return notes
