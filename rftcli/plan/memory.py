"""How much memory a rank needs for weights, gradients and optimizer, and the lowest ZeRO stage that fits.

Leaves out activations and the key-value cache: they get the share of the device that `TRAINING_SHARE` leaves.
"""

from __future__ import annotations

from rftcli.plan.facts import MachineFacts
from rftcli.plan.plan import WorldPlan

TRAINING_SHARE = 0.5
"""Share of a device that weights, gradients and optimizer may take."""
GIB = 1024**3
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def training_bytes(parameters: int, dtype: str, stage: int, ranks: int, trained: int | None = None) -> float:
    """Bytes per rank of weights, float32 gradients, float32 master weights (bfloat16 only) and two Adam moments under a ZeRO stage. `trained`: the
    parameters that have gradients; None: all."""
    weights = float(DTYPE_BYTES[dtype] * parameters)
    trained = parameters if trained is None else trained
    gradients = 4.0 * trained
    optimizer = (8.0 if dtype == "float32" else 12.0) * trained
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
    *,
    trained: int | None = None,
    lowest: int | None = None,
    highest: int = 3,
) -> tuple[int, str]:
    """(lowest stage that fits, the reason). bfloat16 starts at stage 1: DeepSpeed keeps float32 master weights from there on."""
    if lowest is None:
        lowest = 1 if dtype == "bfloat16" else 0
    if parameters is None:
        stage = 2 if world.ranks > 1 else lowest
        return stage, "the model's size is not known before it is loaded"
    budget = machine.gpu_memory_gib if world.device == "cuda" else machine.memory_gib / world.ranks
    for stage in range(lowest, highest + 1):
        if stage > lowest and world.ranks == 1:
            break
        need = training_bytes(parameters, dtype, stage, world.ranks, trained) / GIB
        if need <= TRAINING_SHARE * budget:
            return stage, f"{need:.2f} GiB a rank of weights, gradients and optimizer fit into {TRAINING_SHARE:.0%} of {budget:.0f} GiB"
    stage = highest if world.ranks > 1 else lowest
    need = training_bytes(parameters, dtype, stage, world.ranks, trained) / GIB
    return stage, f"even so {need:.1f} GiB a rank are more than {TRAINING_SHARE:.0%} of {budget:.0f} GiB: expect to run out of memory"
