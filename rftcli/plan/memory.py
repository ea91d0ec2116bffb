"""How much memory a rank needs for weights, gradients and optimizer, and the lowest ZeRO stage that fits.

Leaves out activations and the key-value cache: they get the share of the device that `TRAINING_SHARE` leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from rftcli.plan.facts import MachineFacts
from rftcli.plan.plan import WorldPlan

TRAINING_SHARE = 0.5
"""Share of a device that weights, gradients and optimizer may take."""
REPLICA_SHARE = 0.9
"""Share of a device that training state and the engine's replica may take together; they meet while nothing is trained."""
GIB = 1024**3
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What else decides how many bytes a parameter takes: number types (of a policy in bfloat16), the optimizer, what lies on the CPU."""

    optimizer: str = "adamw"
    master: str = "float32"
    gradients: str = "float32"
    offload_optimizer: bool = False
    offload_parameters: bool = False

    def optimizer_bytes(self, dtype: str) -> float:
        """Bytes of a parameter's master weight and moments on the training device."""
        if self.offload_optimizer:
            return 0.0
        number = DTYPE_BYTES["float32" if dtype == "float32" else self.master]
        moments = 2 if self.optimizer == "adamw_8bit" else 2 * number  # muon has one moment of hidden matrices: counted as two
        return moments + (0 if dtype == "float32" else number)


PLAIN = Keeping()


def training_bytes(parameters: int, dtype: str, stage: int, ranks: int, keeping: Keeping = PLAIN, *, trained: int | None = None) -> float:
    """Bytes per rank, on the training device, of weights, gradients, master weights (bfloat16 only) and two Adam moments under a ZeRO stage.
    `trained`: the parameters that have gradients; None: all."""
    trained = parameters if trained is None else trained
    weights = 0.0 if keeping.offload_parameters else float(DTYPE_BYTES[dtype] * parameters)
    gradients = float(DTYPE_BYTES["float32" if dtype == "float32" else keeping.gradients] * trained)
    optimizer = keeping.optimizer_bytes(dtype) * trained
    if stage >= 1:
        optimizer /= ranks
    if stage >= 2:
        gradients /= ranks
    if stage >= 3:
        weights /= ranks
    return weights + gradients + optimizer


def zero_stage(
    parameters: int | None,
    dtype: str,
    world: WorldPlan,
    machine: MachineFacts,
    keeping: Keeping = PLAIN,
    *,
    trained: int | None = None,
    lowest: int | None = None,
    highest: int = 3,
) -> tuple[int, str]:
    """(lowest stage that fits, the reason). Without a `lowest`, bfloat16 starts at stage 1: DeepSpeed keeps float32 master weights from there on."""
    if lowest is None:
        lowest = 1 if dtype == "bfloat16" else 0
    if parameters is None:
        stage = min(highest, max(lowest, 2 if world.ranks > 1 else 0))
        return stage, "the model's size is not known before it is loaded"
    budget = machine.gpu_memory_gib if world.device == "cuda" else machine.memory_gib / world.ranks
    for stage in range(lowest, highest + 1):
        if stage > lowest and world.ranks == 1:
            break
        need = training_bytes(parameters, dtype, stage, world.ranks, keeping, trained=trained) / GIB
        if need <= TRAINING_SHARE * budget:
            return stage, f"{need:.2f} GiB a rank of weights, gradients and optimizer fit into {TRAINING_SHARE:.0%} of {budget:.0f} GiB"
    stage = highest if world.ranks > 1 else lowest
    need = training_bytes(parameters, dtype, stage, world.ranks, keeping, trained=trained) / GIB
    return stage, f"even so {need:.1f} GiB a rank are more than {TRAINING_SHARE:.0%} of {budget:.0f} GiB: expect to run out of memory"


def with_replica(parameters: int, dtype: str, world: WorldPlan, machine: MachineFacts, *, trained: int | None = None) -> tuple[float, float, str]:
    """(GiB needed, GiB allowed, the sum as text): stage 3's training state of a rank and a whole copy of the weights beside it."""
    budget = machine.gpu_memory_gib if world.device == "cuda" else machine.memory_gib / world.ranks
    training = training_bytes(parameters, dtype, 3, world.ranks, trained=trained) / GIB
    replica = DTYPE_BYTES[dtype] * parameters / GIB
    text = f"{replica:.2f} GiB of weights + {training:.2f} GiB of training state = {replica + training:.2f} GiB a rank"
    return replica + training, REPLICA_SHARE * budget, f"{text}, of {REPLICA_SHARE:.0%} of {budget:.0f} GiB"
