"""Memory at the start, before ZeRO cuts anything: every rank loads a model whole onto its device, proves it there, and keeps its part.

Only where a rank holds less than the whole later on can the start be what does not fit. Leaves out everything from the first step on
(`compile_memory`).
"""

from __future__ import annotations

from rftcli.plan import memory
from rftcli.plan.compile_memory import Asked
from rftcli.plan.memory import GIB
from rftcli.plan.plan import LearnerPlan


def start_note(asked: Asked, learner: LearnerPlan | None) -> str | None:
    """What is said of a model that does not fit whole; None where it does, or where its size is not known."""
    policy, recipe = asked.policy, asked.recipe
    cut = learner is not None and (learner.zero_stage == 3 or recipe.train.offload.parameters != "none")
    if not cut:
        return None
    bits = None if policy.quantise is None else policy.quantise.bits
    critic = None if recipe.models.critic is None else asked.critic or asked.facts.model
    whole = {"the policy": memory.frozen_copy(asked.facts.model.parameters or 0, policy.dtype, bits=bits)}
    if critic is not None:
        whole["the critic"] = memory.frozen_copy(critic.parameters or 0, policy.dtype)
    name, size = max(whole.items(), key=lambda item: item[1])
    if size <= asked.usable:
        return None
    return (
        f"memory: expect to run out of it at the start. Every rank loads {name} whole before ZeRO cuts it: {size / GIB:.1f} GiB of "
        f"{asked.usable / GIB:.1f} GiB; use larger devices, a smaller model, or models.policy.quantise with models.policy.lora"
    )
