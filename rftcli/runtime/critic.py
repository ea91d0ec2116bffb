"""The critic as a trained role, and all trained roles as one to a checkpoint.

What it leaves out: the value model itself (`models.value`) and what its values are for (`stages.values`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rftcli.errors import RftError
from rftcli.models.value import ValueModel, export_value_model, load_value_model
from rftcli.plan.plan import CriticPlan
from rftcli.protocols import World
from rftcli.runtime.learner import DeepSpeedLearner
from rftcli.runtime.models import fitted, start_device
from rftcli.runtime.writes import NOW, Later, Writer
from rftcli.types import Batch

CRITIC_FOLDER = "critic"
"""Inside a checkpoint's trainer/: the critic's DeepSpeed state; beside policy/: its Hugging Face form."""


class CriticLearner(DeepSpeedLearner):
    """A DeepSpeedLearner whose module gives values instead of log-probs."""

    def values(self, batch: Batch) -> torch.Tensor:
        """(N,) the value before each trained token."""
        return self.logprobs(batch, 1.0)[0]


def make_critic(plan: CriticPlan, world: World, device: torch.device, tokenizer: Any) -> CriticLearner:
    """`tokenizer`: the policy's, whose added tokens the critic reads too."""
    model = load_value_model(
        plan.model.path,
        head=plan.head,
        dtype=plan.model.dtype,
        attention=plan.model.attention,
        options=plan.model.options,
        trust_remote_code=plan.model.trust_remote_code,
        device=start_device(plan.learner, device),
        revision=plan.model.revision,
        kernels=plan.model.kernels,
    )
    fitted(model, plan.model, tokenizer)
    return CriticLearner(ValueModel(model, gradient_checkpointing=plan.model.gradient_checkpointing), plan.learner, world, device, temperature=1.0)


def saved_critic(plan: CriticPlan, policy: Path | None) -> CriticPlan:
    """The critic to start from: the plan's, or the one saved beside the `policy` of a checkpoint without the trainer's state."""
    folder = None if policy is None else policy.with_name(CRITIC_FOLDER)
    return plan if folder is None or not folder.is_dir() else replace(plan, head=None, model=replace(plan.model, path=str(folder), revision=None))


class Trained:
    """Policy and, if there is one, critic: what a checkpoint's trainer/ holds."""

    def __init__(self, policy: Any, critic: CriticLearner | None) -> None:
        self.policy = policy
        self.critic = critic

    def save(self, directory: Path, to: Writer = NOW) -> None:
        """Collective. An error of one role is raised after both are through: the other ranks are still writing."""
        failure: OSError | RuntimeError | None = None
        for learner, folder in self.roles(directory):
            try:
                learner.save(folder, to)
            except (OSError, RuntimeError) as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def load(self, directory: Path) -> None:
        for learner, folder in self.roles(directory):
            learner.load(folder)

    def roles(self, directory: Path) -> list[tuple[Any, Path]]:
        roles = [(self.policy, directory)]
        return roles if self.critic is None else [*roles, (self.critic, directory / CRITIC_FOLDER)]


def export_critic(critic: CriticLearner, tokenizer: Any, directory: Path, world: World, later: Later | None = None) -> None:
    """The critic so that from_pretrained loads it. Collective: rank 0 keeps what the others help to gather, and writes, or has it written later."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in critic.weights():
        if world.rank == 0:
            state[name] = tensor.to("cpu", copy=True)
    if later is not None:
        if world.rank == 0:
            later.call(lambda: export_value_model(critic.module.model, tokenizer, state, directory))
        return
    problem = None
    if world.rank == 0:
        try:
            export_value_model(critic.module.model, tokenizer, state, directory)
        except (OSError, SafetensorError) as error:  # the second is how safetensors tells of a full disk
            problem = f"{type(error).__name__}: {error}"
    failed = next((text for text in world.gather(problem) if text is not None), None)
    if failed is not None:
        hint = f"free space (`df -h {directory.parent}`), then `rft resume`"
        raise RftError(f"the critic could not be written to {directory}: {failed}", hint=hint)
