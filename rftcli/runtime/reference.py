"""The reference policy: a frozen model that may wait in CPU memory and may follow the policy, or the policy's own module with its adapter off.

What it leaves out: when a reference is needed (the plan says) and the KL term.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rftcli.models.lora import Adapter
from rftcli.protocols import Weights
from rftcli.runtime.learner import DeepSpeedLearner, policy_inputs, temperature_of
from rftcli.runtime.writes import NOW, Writer
from rftcli.types import Batch

STATE = "reference.pt"


class ModelReference:
    """A model of its own. `offload`: it lies in CPU memory from `sleep` to the next use. `refresh_every` steps, `mix` of the policy goes into it
    (as TRL's `ref_model_mixup_alpha`: reference = mix x policy + (1 - mix) x reference); what it is then is part of checkpoints."""

    def __init__(self, module: torch.nn.Module, device: torch.device, *, offload: bool, refresh_every: int, mix: float, writes: bool) -> None:
        self._module = module.eval().requires_grad_(False)
        self._device = device
        self._offload = offload
        self._refresh_every = refresh_every
        self._mix = mix
        self._writes = writes
        self._refreshed = False
        self._awake = not offload

    def logprobs(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._awake:
            self._module.to(self._device)
            self._awake = True
        with torch.no_grad():
            return self._module(**policy_inputs(batch), temperature=temperature_of(batch, temperature))

    def sleep(self) -> None:
        """Leave the device until the next use."""
        if self._offload and self._awake:
            self._module.to("cpu")
            self._awake = False
            if self._device.type != "cpu":
                torch.accelerator.empty_cache()

    def follow(self, step: int, learner: DeepSpeedLearner) -> None:
        """After the updates of a step: mix the policy in if it is time. Collective where weights are sharded."""
        if self._refresh_every and step % self._refresh_every == 0:
            self.mix_in(learner.weights())

    @torch.no_grad()
    def take(self, weights: Weights) -> None:
        """Be these weights."""
        own = self._module.model.state_dict(keep_vars=True)
        for name, tensor in weights:
            own[name].copy_(tensor)

    @torch.no_grad()
    def mix_in(self, weights: Weights) -> None:
        """Whole weights by their names in the model; sums are taken in float32."""
        own = self._module.model.state_dict(keep_vars=True)
        for name, tensor in weights:
            target = own[name]
            target.copy_(torch.lerp(target.float(), tensor.to(target.device, torch.float32), self._mix))
        self._refreshed = True

    # what the learner keeps with its weights

    def updated(self) -> None:
        """It follows steps, not updates."""

    def save(self, directory: Path, to: Writer = NOW) -> None:
        if self._writes and self._refreshed:  # every rank has the same; before the first refresh it is what was loaded
            directory.mkdir(parents=True, exist_ok=True)
            to.tensors({name: parameter.data for name, parameter in self._module.model.named_parameters()}, directory / STATE)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        if not (directory / STATE).is_file():
            return
        state = torch.load(directory / STATE, weights_only=True, map_location="cpu")
        for name, parameter in self._module.model.named_parameters():
            parameter.copy_(state[name])
        self._refreshed = True


class ShardedReference:
    """A model of its own of which every rank holds a part: `engine` gathers its layers as a pass reaches them, so all ranks make equally many."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def logprobs(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return self._engine(**policy_inputs(batch), temperature=temperature_of(batch, temperature))

    def sleep(self) -> None:
        """Its part stays on the device."""

    def follow(self, step: int, learner: DeepSpeedLearner) -> None:
        """It stays what it was loaded as."""


class AdapterReference:
    """The policy's own module without its adapter, or under the frozen copy of the adapter it started from: no second copy of the model."""

    def __init__(self, learner: DeepSpeedLearner, adapter: Adapter) -> None:
        self._learner = learner
        self._adapter = adapter

    def logprobs(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), self._adapter.as_reference():
            return self._learner.logprobs(batch, temperature)

    def sleep(self) -> None:
        """It is the trainer's module: there is nothing to move."""

    def follow(self, step: int, learner: DeepSpeedLearner) -> None:
        """It stays what the policy was before training."""
