"""A trained role under DeepSpeed: the same code for every ZeRO stage, on gloo and on nccl.

DeepSpeed averages gradients over ranks; the loss that comes in is already this micro-batch's share of the global one. So the loss is multiplied
by the number of ranks, here and nowhere else, and what is reduced is the sum. Leaves out what the loss is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from rftcli.algo.schedules import learning_rate
from rftcli.errors import RftError
from rftcli.models.lora import AdaptedWeights, Adapter, Present
from rftcli.plan.plan import LearnerPlan
from rftcli.protocols import LossFunction, StepOutcome, Weights, World
from rftcli.runtime.buckets import buckets
from rftcli.runtime.optimizers import make_optimizer
from rftcli.runtime.whole_layers import gather_whole_layers
from rftcli.runtime.writes import NOW, Writer
from rftcli.types import Batch

GATHER_BYTES = 256 * 2**20
"""Sharded weights that are made whole together: one collective for many small tensors, and little memory."""
CLIP_MARGIN = 1e-6
"""What torch adds to the norm that it divides by."""
TAG = "state"
"""The one tag of a DeepSpeed checkpoint inside our checkpoint's trainer/ folder."""


# DeepSpeed would compile a kernel for collectives in shared memory at the first start on a CPU: half a minute and a C++ compiler, to save
# microseconds. gloo does the same work.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class HeldBackWriter(TorchCheckpointEngine):
    """Writes as DeepSpeed does, but keeps an error until all ranks are through: a rank that left `save_checkpoint` in the middle because its disk
    is full would leave the others waiting in its barriers."""

    failure: OSError | RuntimeError | None = None
    to: Writer = NOW

    def save(self, state_dict: Any, path: str) -> None:
        try:
            self.to.tensors(state_dict, Path(path), zipped=self.zipfile_serialization)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            self.failure = self.failure or error


def policy_inputs(batch: Batch) -> dict[str, Any]:
    """What a policy module's forward takes of a micro-batch."""
    names = ("input_ids", "position_ids", "attention_mask", "select", "target_ids", "most_tokens")
    return {name: getattr(batch, name) for name in names}


def temperature_of(batch: Batch, temperature: float) -> float | torch.Tensor:
    """What a micro-batch's log-probs are taken at: the temperature its tokens were sampled at, where they have their own, else this one."""
    return temperature if batch.temperatures is None else batch.temperatures


def cut(module: torch.nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Each rank keeps its part of every tensor, on `device`, which holds one whole tensor at a time. Rank 0's values count. Buffers go there whole.
    Collective."""
    deepspeed.init_distributed(dist_init_required=False)  # what `initialize` does first, too
    zero.Init(module=module, config_dict_or_path=dict(config))
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


class Companion(Protocol):
    """Something that follows the weights and remembers tensors: it is saved and loaded with them."""

    def updated(self) -> None:
        """After every applied update."""

    def save(self, directory: Path, to: Writer = NOW) -> None: ...

    def load(self, directory: Path) -> None: ...


class DeepSpeedLearner:
    """Learner and Policy at once around one module whose forward gives (log-probs, entropy).

    `temperature`: the sampling temperature; log-probs in training are those of the distribution that was sampled from. With an `adapter` only that
    is trained, and `weights` are those of the model with the adapter merged in. `companions` go into checkpoints by name; one named `ema` is where
    `weights("ema")` come from.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        plan: LearnerPlan,
        world: World,
        device: torch.device,
        *,
        temperature: float,
        adapter: Adapter | None = None,
    ) -> None:
        self.adapter = adapter
        self.companions: dict[str, Any] = {}
        self._device = device
        self.plan = plan
        self.temperature = temperature
        self.version = 0
        self._world = world
        self._skipped_in_a_row = 0
        self._finite: list[torch.Tensor] = []
        self._optimizer = make_optimizer(module, plan)
        # without sharding the learner clips, and DeepSpeed would compute the norm a second time
        config = dict(plan.deepspeed) if plan.zero_stage else {**plan.deepspeed, "gradient_clipping": 0.0}
        if plan.zero_stage == 3:
            gather_whole_layers(module)
        if plan.from_host:
            cut(module, config, device)
        self.engine, *_ = deepspeed.initialize(model=module.to(device), optimizer=self._optimizer, config=config, dist_init_required=False)
        if plan.zero_stage == 0 and world.size == 1:
            self.engine.enable_backward_allreduce = False  # a copy of all gradients into one buffer and back, to sum over one rank
        self._writer = HeldBackWriter()
        self._writer.zipfile_serialization = self.engine.checkpoint_engine.zipfile_serialization
        self.engine.checkpoint_engine = self._writer
        self.engine._copy_recovery_script = lambda path: None  # rank 0 alone would write it, and fail alone; policy/ needs no recovery
        self.module = module

    @property
    def lr(self) -> float:
        plan = self.plan
        return learning_rate(
            self.version, kind=plan.schedule, peak=plan.lr, minimum=plan.min_lr, warmup=plan.warmup_updates, horizon=plan.schedule_updates
        )

    # Policy

    def logprobs(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.engine.train(torch.is_grad_enabled())
        return self.engine(**policy_inputs(batch), temperature=temperature_of(batch, temperature))

    # Learner

    def backward(self, batch: Batch, loss: LossFunction, last: bool, temperature: float | None = None) -> Mapping[str, torch.Tensor]:
        self.engine.set_gradient_accumulation_boundary(last)
        new, entropy = self.logprobs(batch, self.temperature if temperature is None else temperature)
        batch.router_losses = self.module.router_losses
        value, measured = loss(new, entropy, batch)
        # A filler's empty output has to reach every parameter, or ranks would wait for each other's reductions.
        scaled = value * self._world.size + 0.0 * new.sum()
        self._finite.append(torch.isfinite(scaled.detach()))
        self.engine.backward(scaled)
        return measured

    def step(self) -> StepOutcome:
        lr = self.lr
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = self._clip_unsharded() if self.plan.zero_stage == 0 else None
        broken = not all(bool(flag) for flag in self._finite) or (norm is not None and not math.isfinite(norm))
        self._optimizer.skip = bool(self._world.max([broken])[0])
        self.engine.step()
        overflow = bool(getattr(self.engine.optimizer, "overflow", False))
        if norm is None:
            norm = float(self.engine.get_global_grad_norm() or 0.0)
        applied = not (self._optimizer.skip or overflow) and math.isfinite(norm) and norm >= 0.0
        if not applied and self.plan.zero_stage in (1, 2):
            self._forget_gradients()
        self._finite.clear()
        self._optimizer.skip = False
        self._count(applied)
        return StepOutcome(applied=applied, grad_norm=norm if applied else None, lr=lr)

    def _forget_gradients(self) -> None:
        """DeepSpeed keeps its buffers after an update that was not finite where the optimizer is offloaded: the next one would be skipped too."""
        kept = getattr(self.engine.optimizer, "averaged_gradients", {})
        for group in kept:
            kept[group] = None

    def _clip_unsharded(self) -> float:
        """Norm over the already reduced gradients, which every rank holds whole; clips in place. ZeRO does both itself on its shards."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm, limit = float(total), self.plan.max_grad_norm
        if limit is not None and norm + CLIP_MARGIN > limit:  # else the factor is 1
            torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), limit, total)
        return norm

    def _count(self, applied: bool) -> None:
        if applied:
            self.version += 1
            self._skipped_in_a_row = 0
            for companion in self.companions.values():
                companion.updated()
            return
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > self.plan.skip_at_most:
            raise RftError(
                f"{self._skipped_in_a_row} updates in a row had a loss or gradient that is not finite (train.nonfinite.skip_at_most is "
                f"{self.plan.skip_at_most})",
                hint="lower train.optimizer.lr, or look at the last samples for what the rewards did; weights are as before these updates",
            )

    def weights(self, of: str = "live") -> Weights:
        """(name in the Hugging Face model, full tensor); `of`: live, or ema for the running mean. Every rank must go through to the end."""
        present = partial(self.present, of=of)
        return self._plain(present) if self.adapter is None else AdaptedWeights(self.adapter, present)

    def _plain(self, present: Present) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in buckets(self.module.model.named_parameters(), GATHER_BYTES if self.plan.zero_stage == 3 else 0):
            with present([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.data.detach()

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are updated, by their names in the (wrapped) model."""
        return {name: parameter for name, parameter in self.module.model.named_parameters() if parameter.requires_grad}

    @contextmanager
    def present(self, parameters: Sequence[torch.nn.Parameter], of: str = "live") -> Iterator[None]:
        """Whole parameters: gathered if they are sharded, and with `of` ema holding the running mean for as long. Collective."""
        gather = zero.GatheredParameters(list(parameters)) if self.plan.zero_stage == 3 else nullcontext()
        with gather:
            before = [parameter.data for parameter in parameters]
            try:
                if of != "live":
                    self.companions[of].put_in(parameters)
                yield
            finally:
                for parameter, data in zip(parameters, before, strict=True):
                    parameter.data = data

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's part of a parameter, flat; parts of all ranks are equally long, the last is padded. No collective: under ZeRO-3 it is what the
        rank holds, else a slice."""
        if self.plan.zero_stage == 3:
            return parameter.ds_tensor.data
        flat = parameter.data.reshape(-1)
        length = -(-flat.numel() // self._world.size)
        mine = flat[self._world.rank * length : (self._world.rank + 1) * length]
        return torch.nn.functional.pad(mine, (0, length - mine.numel()))

    def joined(self, part: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The whole tensor that the ranks' parts make up, in the shape of the parameter, on the learner's device. Collective."""
        part = part.to(self._device)
        whole = part
        if self._world.size > 1:
            whole = torch.empty(part.numel() * self._world.size, dtype=part.dtype, device=part.device)
            dist.all_gather_into_tensor(whole, part.contiguous())
        shape = getattr(parameter, "ds_shape", parameter.shape)
        return whole[: shape.numel()].view(shape)

    def save(self, directory: Path, to: Writer = NOW) -> None:
        """Raises OSError or RuntimeError where this rank's part could not be written, after the others have written theirs."""
        self._writer.failure, self._writer.to = None, to
        # weights below an adapter never change: they are the model's own
        self.engine.save_checkpoint(str(directory), tag=TAG, save_latest=False, exclude_frozen_parameters=self.adapter is not None)
        for name, companion in self.companions.items():
            try:
                companion.save(directory / name, to)
            except (OSError, RuntimeError) as error:
                self._writer.failure = self._writer.failure or error
        if self._writer.failure is not None:
            raise self._writer.failure

    def load(self, directory: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(directory), tag=TAG, load_module_strict=self.adapter is None)
        if path is None:
            raise RftError(f"DeepSpeed could not read {directory / TAG}")
        for name, companion in self.companions.items():
            companion.load(directory / name)

    def load_universal(self, directory: Path) -> None:
        """Load what any number of ranks have saved, turned into one file a parameter (`reshape`)."""
        config = self.engine._config
        config.load_universal_checkpoint = True
        try:
            self.load(directory)
        finally:
            config.load_universal_checkpoint = False

    def roles(self, directory: Path) -> list[tuple[DeepSpeedLearner, Path]]:
        """Who is saved where in `directory`: this one alone."""
        return [(self, directory)]

    @property
    def zero_stage(self) -> int:
        return self.plan.zero_stage

    def state_dict(self) -> Mapping[str, Any]:
        return {"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])
