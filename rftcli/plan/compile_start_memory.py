"""Memory at the start, before ZeRO cuts anything. A rank loads a model whole onto its device, proves it there, and keeps its part; where no device
holds it whole, it is loaded into the machine's memory, cut from there tensor by tensor, and proved in parts.

Leaves out everything from the first step on (`compile_memory`), and how it is done (`runtime.learner`).
"""

from __future__ import annotations

from dataclasses import replace

from rftcli.plan import memory
from rftcli.plan.compile_memory import Asked
from rftcli.plan.facts import ModelFacts
from rftcli.plan.memory import GIB
from rftcli.plan.plan import LearnerPlan


def with_start(asked: Asked, learner: LearnerPlan | None, notes: list[str]) -> LearnerPlan | None:
    """The learner, and whether its models are cut in the machine's memory. Only where a rank holds less than the whole later on can the start be what
    does not fit."""
    cut = learner is not None and (learner.zero_stage == 3 or asked.recipe.train.offload.parameters != "none")
    if learner is None or not cut:
        return learner
    policy = asked.policy
    bits = None if policy.quantise is None else policy.quantise.bits
    own = asked.critic or asked.facts.model
    models: dict[str, ModelFacts] = {"the policy": asked.facts.model} | ({} if asked.recipe.models.critic is None else {"the critic": own})
    whole = {name: memory.frozen_copy(model.parameters or 0, policy.dtype, bits=bits) for name, model in models.items()}
    name, size = max(whole.items(), key=lambda item: item[1])
    if size <= asked.usable:
        return learner
    if bits is not None or asked.world.device == "cpu":
        notes.append(
            f"memory: expect to run out of it at the start. Every rank loads {name} whole before ZeRO cuts it: {size / GIB:.1f} GiB of "
            f"{asked.usable / GIB:.1f} GiB; use larger devices, a smaller model, or models.policy.quantise with models.policy.lora"
        )
        return learner
    notes.append(
        f"{name} is loaded into the machine's memory and cut from there: whole it is {size / GIB:.1f} GiB, and {asked.usable / GIB:.1f} GiB of a "
        "device may be used"
    )
    ranks, room = asked.world.ranks // asked.world.nodes, asked.facts.machine.memory_gib * GIB
    need = sum(memory.while_cut(whole[name], model.file_dtype, policy.dtype, ranks=ranks) for name, model in models.items())
    if need > memory.USABLE_SHARE["cpu"] * room:
        notes.append(
            f"memory: expect to run out of the machine's at the start: {need / GIB:.1f} GiB of {room / GIB:.1f} GiB; files in {policy.dtype} are "
            "there once for all ranks, others once for each"
        )
    return replace(learner, from_host=True)
