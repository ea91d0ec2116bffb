"""What a rank holds in memory: one function a term, each a closed formula in bytes.

Every number is of one rank. `dtype`: float32 or bfloat16; "number" is its width in bytes, "positions" are those of one pass, padding included. What
DeepSpeed keeps was counted on its stages 0 to 3 with the configuration that `deepspeed_config` writes; what autograd keeps, by its saved tensors.
Leaves out the CUDA context, NCCL and fragmentation (`USABLE_SHARE`), and what is chosen because of the sums (`memory_ladder`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from rftcli.plan.deepspeed_config import BUCKET_ELEMENTS
from rftcli.plan.facts import MachineFacts, ModelFacts
from rftcli.plan.plan import WorldPlan

GIB = 1024**3
USABLE_SHARE = {"cuda": 0.92, "cpu": 0.85}
"""Of a device: the rest goes to the CUDA context, NCCL and fragmentation; on a CPU to the system and what else runs there."""
PROCESS_BYTES = {"cuda": 64 * 2**20, "cpu": 0.7 * GIB}
"""Of a rank beside its model: on a GPU cuBLAS's workspaces, 32 MiB each for the threads of forward and backward passes (torch's default on Hopper);
on a CPU torch, transformers and DeepSpeed themselves."""
REPLICA_SHARE = 0.9
"""Share of a device that training state and the engine's replica may take together; they meet while nothing is trained."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
SCORE_COPIES = 3
"""Float32 copies of (sequences, vocabulary) that are alive while an engine with a model of its own chooses tokens."""
CHOICE_BYTES = {"none": 16, "top_k": 18, "min_p": 24, "top_p": 50, "options": 76}
"""Bytes a score of the choice of a token: weights and their sums in float64; top-p and the filters of `hf.options` sort them, too."""
HEAD_CHUNK_BYTES = 256 * 2**20
"""Float32 scores of one chunk of the head (`models.policy.HEAD_BYTES`)."""
HEAD_COPIES = {"float32": 4, "bfloat16": 5}
"""Chunks alive in the backward pass of one: scores, log-softmax, and the gradients of both; in bfloat16 scores and gradient once more, in half."""
LIVE_PARAMETERS = 1_000_000_000
"""What DeepSpeed keeps gathered under stage 3 at most, and how soon it has to be used again to be kept (`stage3_max_live_parameters` and
`stage3_max_reuse_distance`, deepspeed.ai/docs/config-json)."""
SUB_GROUP = 1_000_000_000
"""Parameters that DeepSpeed steps at once under stage 3 (`sub_group_size`)."""
REDUCED_AT_ONCE = 500_000_000
"""Elements that DeepSpeed copies into one tensor to reduce it at stage 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What else decides how many bytes a parameter takes: number types (of a policy in bfloat16), the optimizer, what lies on the CPU."""

    optimizer: str = "adamw"
    master: str = "float32"
    gradients: str = "float32"
    offload_optimizer: bool = False
    offload_parameters: bool = False


PLAIN = Keeping()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The widths of a decoder that its terms are made of."""

    parameters: int
    layers: int
    hidden: int
    inner: int
    """Numbers of a position between the two matrices of a layer's MLP; of all experts that a position goes through."""
    query_width: int
    """Heads x width of a head."""
    key_width: int
    """Heads of keys x width of a head."""
    vocabulary: int
    heads: int = 0


def shape_of(model: ModelFacts) -> Shape | None:
    """None where the files do not say enough. A width that they leave out is taken from the original transformer: an MLP of 4 x hidden."""
    if model.parameters is None or model.layers is None or model.hidden is None:
        return None
    return Shape(
        parameters=model.parameters,
        layers=model.layers,
        hidden=model.hidden,
        inner=model.inner or 4 * model.hidden,
        query_width=model.query_width or model.hidden,
        key_width=model.key_width or model.query_width or model.hidden,
        vocabulary=model.vocabulary or 0,
        heads=model.heads or 0,
    )


# State: what a parameter costs for as long as the run lasts.


def weights(parameters: int, dtype: str, *, stage: int = 0, ranks: int = 1, keeping: Keeping = PLAIN) -> float:
    """number x parameters; over the ranks under stage 3 (arXiv:1910.02054, section 5)."""
    if keeping.offload_parameters:
        return 0.0
    return DTYPE_BYTES[dtype] * parameters / (ranks if stage >= 3 else 1)


def gathered(shape: Shape, dtype: str, *, stage: int, ranks: int) -> float:
    """Under stage 3 and more than one rank: what is whole for a pass because it is needed again soon, at least a layer and the next one."""
    if stage < 3 or ranks == 1:
        return 0.0
    return DTYPE_BYTES[dtype] * float(min(shape.parameters, max(LIVE_PARAMETERS, 2 * shape.parameters // shape.layers)))


def optimizer(trained: int, dtype: str, *, stage: int, ranks: int, keeping: Keeping = PLAIN) -> float:
    """Moments and master weights. From stage 1 on DeepSpeed keeps master weights of float32 parameters too, a copy of this rank's part."""
    if keeping.offload_optimizer:
        return 0.0
    number = DTYPE_BYTES["float32" if dtype == "float32" else keeping.master]
    moments = 2 if keeping.optimizer == "adamw_8bit" else 2 * number  # muon has one moment of hidden matrices: counted as two
    master = number if stage >= 1 or dtype != "float32" else 0
    return (moments + master) * trained / (ranks if stage >= 1 else 1)


def gradients(trained: int, dtype: str, *, stage: int, ranks: int, keeping: Keeping = PLAIN) -> float:
    """Summed over micro-batches: whole up to stage 1, this rank's part from stage 2 on. A policy in bfloat16 at stage 1 sums into float32 beside the
    gradients of the pass itself. Of an offloaded optimizer sums lie beside it under stage 3, and at stage 2 if they are of the policy's type."""
    if keeping.offload_optimizer and (stage == 3 or (stage == 2 and not widened(dtype, keeping))):
        return 0.0
    number = DTYPE_BYTES["float32" if dtype == "float32" else keeping.gradients]
    of_the_pass = DTYPE_BYTES[dtype] if sums_apart(dtype, stage, keeping) else 0
    return (number / (ranks if stage >= 2 else 1) + of_the_pass) * trained


def widened(dtype: str, keeping: Keeping = PLAIN) -> bool:
    """Are gradients summed in a wider type than that which they are computed in?"""
    return dtype == "bfloat16" and keeping.gradients == "float32"


def sums_apart(dtype: str, stage: int, keeping: Keeping = PLAIN) -> bool:
    """DeepSpeed's optimizer of bfloat16 at stage 1 keeps its float32 sums of gradients from one update to the next."""
    return stage == 1 and widened(dtype, keeping) and not keeping.offload_optimizer


def kept_gradients(trained: int, dtype: str, *, stage: int, ranks: int, keeping: Keeping = PLAIN) -> float:
    """Of `gradients`, what stays on the device from one update to the next: the sums of stage 3, unless the optimizer is offloaded and they with it,
    and those of `sums_apart`."""
    if keeping.offload_optimizer or (stage != 3 and not sums_apart(dtype, stage, keeping)):
        return 0.0
    whole = gradients(trained, dtype, stage=stage, ranks=ranks, keeping=keeping)
    return whole if stage == 3 else whole - DTYPE_BYTES[dtype] * trained


def training_bytes(parameters: int, dtype: str, stage: int, ranks: int, keeping: Keeping = PLAIN, *, trained: int | None = None) -> float:
    """Weights, gradients and optimizer together. `trained`: the parameters that have gradients; None: all."""
    trained = parameters if trained is None else trained
    of = {"stage": stage, "ranks": ranks, "keeping": keeping}
    return weights(parameters, dtype, **of) + gradients(trained, dtype, **of) + optimizer(trained, dtype, **of)


def buckets(dtype: str, *, stage: int, ranks: int, keeping: Keeping = PLAIN) -> float:
    """Of the reductions in a backward pass: one of BUCKET_ELEMENTS, in the type of the gradients up to stage 2, of their sums under stage 3, and at
    stage 1 with an offloaded optimizer, which reduces sums."""
    if stage == 0 or sums_apart(dtype, stage, keeping):
        return 0.0
    of_sums = stage == 3 or (stage == 1 and widened(dtype, keeping))
    return float(DTYPE_BYTES["float32" if dtype == "float32" else keeping.gradients if of_sums else dtype] * BUCKET_ELEMENTS)


def on_the_way(largest: int, dtype: str, *, stage: int, keeping: Keeping = PLAIN) -> float:
    """What DeepSpeed keeps at stages 1 and 2 to bring gradients to an offloaded optimizer: room for the largest parameter, on either side."""
    return float(DTYPE_BYTES[dtype] * largest) if keeping.offload_optimizer and stage in (1, 2) else 0.0


def update_copies(trained: int, dtype: str, *, stage: int, ranks: int, keeping: Keeping = PLAIN) -> float:
    """Beyond the state when activations are gone, while the optimizer steps: the gradients of stages 1 and 2 once more, flat; at stage 0 what is
    reduced at once. An offloaded optimizer gets those of stage 1 from a flat copy too, if they are summed in a wider type; at stage 2 the last pass
    keeps its gradients to its end."""
    if stage == 0:
        return 4.0 * min(trained, REDUCED_AT_ONCE) if ranks > 1 else 0.0
    if stage == 3 or sums_apart(dtype, stage, keeping):
        return 0.0
    if keeping.offload_optimizer:
        number = DTYPE_BYTES[dtype] if stage == 2 else DTYPE_BYTES["float32"] if widened(dtype, keeping) else 0
        return float(number) * trained / ranks
    return 4.0 * trained / ranks


def frozen_copy(parameters: int, dtype: str, *, bits: int | None = None, ranks: int = 1) -> float:
    """A reference, teacher, reward model or replica: weights alone, in `bits` where they are quantised, over `ranks` that partition them."""
    return (DTYPE_BYTES[dtype] if bits is None else bits / 8) * parameters / ranks


def while_cut(size: float, stored: str | None, dtype: str, *, ranks: int) -> float:
    """Of a machine with so many ranks, while a model of `size` bytes is cut there for ZeRO 3: files in the type that is used are mapped, and their
    pages are the same for all ranks; of others every rank has a copy. `stored`: the files' type; None: not known."""
    return size * (1 if stored == dtype else ranks)


def running_mean(trained: int, *, ranks: int) -> float:
    """The EMA of the trained weights: float32, this rank's part."""
    return 4.0 * trained / ranks


# Sampling.


def cache_per_token(shape: Shape, dtype: str, *, tensor_parallel: int = 1) -> float:
    """Keys and values of a position in all layers: 2 x layers x key width x number."""
    return 2 * shape.layers * shape.key_width * DTYPE_BYTES[dtype] / tensor_parallel


def kv_cache(shape: Shape, dtype: str, *, sequences: int, tokens: int) -> float:
    """Of so many sequences, each with room for `tokens`."""
    return cache_per_token(shape, dtype) * sequences * tokens


def chosen_scores(rows: int, vocabulary: int, dtype: str, *, filters: Collection[str] = ()) -> float:
    """Of the engine `hf`: the scores of one token of each row, in the number type and in float32, and what the choice makes of them in float64
    (`engines.sampling`). `filters`: those of CHOICE_BYTES that are on."""
    scores = 4 if dtype == "float32" else 4 + DTYPE_BYTES[dtype]
    return float(rows * vocabulary * (scores + max(CHOICE_BYTES[name] for name in ("none", *filters))))


def passing(shape: Shape, dtype: str, *, positions: int) -> float:
    """A forward pass that keeps nothing for a backward one: residual, norm, and a layer's MLP with gate, up and product."""
    return float(DTYPE_BYTES[dtype] * positions * (4 * shape.hidden + 3 * shape.inner))


# Learning.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One micro-batch on its way through the layers."""

    positions: int
    mask_width: int = 0
    """Of the mask of every row, where there is one: the whole pack, the longest row with eager attention; 0: none."""
    eager: bool = False
    adapters: bool = False
    """Only adapters are trained."""
    widened: bool = False
    """Adapted layers copy what goes in in float32."""
    scaled: bool = False
    """They scale what they and their adapters give, row by row of the matrix: those of DoRA."""
    dropout: int = 0
    """Bytes of a number that dropout in front of adapters draws: 1 on a GPU, those of the type on a CPU; 0: there is none."""
    fused: bool = False
    """Norms and gated layers are computed by `train.kernels`."""


def layer_activations(shape: Shape, dtype: str, one: Pass) -> float:
    """What autograd keeps of one layer of a Llama-shaped decoder as transformers computes it:

        two norms      2 x (input in float32, its normalised form, their output)   2 x (4 + 2 number) x hidden
        attention      queries, keys, values and what comes out                    number x (2 query width + 2 key width)
        MLP            gate, its activation, up, their product                     4 x number x inner

    A mask is made anew for every layer, in the number type, and with one keys and values are repeated for all query heads. Eager attention keeps the
    softmax of every head, in float32 and in the number type. Below adapters nothing has gradients: what only a frozen weight's gradient would need is
    not kept. Dropout in front of adapters keeps what it leaves of the inputs of each linear layer, and what it drew. Adapted layers that copy these
    inputs in float32 (over bfloat16) keep the copies, and not the inputs; those of DoRA keep what the layer gave, and in float32 what the adapter
    gave; with dropout they multiply in float32, and keep the layer's matrix in it. Fused kernels compute in registers what stands here in float32 or
    between gate and product: of norms they keep input and output, of the MLP gate, up and product.
    """
    number = DTYPE_BYTES[dtype]
    keys = shape.query_width if one.mask_width else shape.key_width
    half = number < 4
    apart = one.dropout > 0 or (one.widened and half)  # the inputs of linear layers themselves are not kept
    inputs, outputs = number if one.fused else 4, 0 if apart else number
    norms = 2 * (inputs + outputs + (0 if one.fused or one.adapters else number)) * shape.hidden
    attention = number * (2 * shape.query_width + 2 * keys + one.mask_width)
    scores = (4 + number if half else 4) * shape.heads * one.mask_width if one.eager else 0
    mlp = (4 - one.fused - apart) * number * shape.inner
    of_inputs = (4 if one.widened and half else number * (one.dropout > 0)) + one.dropout
    copies = of_inputs * (5 * shape.hidden + shape.query_width + shape.inner)
    wide = one.scaled and half and one.dropout > 0
    given = ((4 if wide else number) + 4) * one.scaled * (shape.query_width + 2 * shape.key_width + 2 * shape.hidden + 2 * shape.inner)
    matrices = 4 * wide * shape.hidden * (2 * shape.query_width + 2 * shape.key_width + 3 * shape.inner)
    return float(one.positions * (norms + attention + scores + mlp + copies + given) + matrices)


def activations(shape: Shape, dtype: str, one: Pass, *, checkpointing: bool) -> float:
    """Of all layers, and of the last norm with its output where tokens are trained; under checkpointing the input of each layer, and one layer that
    is computed again."""
    layer = layer_activations(shape, dtype, one)
    last = one.positions * (4 + 2 * DTYPE_BYTES[dtype]) * shape.hidden
    if not checkpointing:
        return layer * shape.layers + last
    return layer + float(DTYPE_BYTES[dtype] * one.positions * shape.hidden * shape.layers) + last


def summing(shape: Shape, one: Pass) -> float:
    """While a layer of DoRA sums up its matrix for the norm: its product with a diagonal of ones, in float32, and the sum."""
    return float(4 * one.scaled * (shape.inner**2 + 2 * shape.inner * shape.hidden))


def head(shape: Shape, dtype: str, *, positions: int) -> float:
    """Scores of the chunked head in the backward pass of a chunk, and the gradient of its matrix from that chunk."""
    chunk = min(HEAD_CHUNK_BYTES, 4 * positions * shape.vocabulary)
    return float(HEAD_COPIES[dtype] * chunk + DTYPE_BYTES[dtype] * shape.vocabulary * shape.hidden)


def head_scores(shape: Shape, dtype: str, *, positions: int) -> float:
    """The same without gradients: scores, log-softmax, and the entropy's two copies."""
    return float(4 * min(HEAD_CHUNK_BYTES, 4 * positions * shape.vocabulary))


# The host.


def pinned(size: float) -> float:
    """torch rounds pinned memory up to a power of two (ATen/core/CachingHostAllocator.h)."""
    return float(2 ** math.ceil(math.log2(size))) if size > 0 else 0.0


def offloaded(trained: int, largest: int, dtype: str, *, stage: int, ranks: int, keeping: Keeping) -> dict[str, float]:
    """Of one rank's offloaded optimizer in the host's memory, by name. Moments lie there as they are, and so do master weights under stage 3; before
    it they are pinned. Pinned are the gradients that the optimizer takes, under stage 3 in pieces of SUB_GROUP, and beside them: under stage 3 the
    sums of gradients; before it the new weights on their way, room for the largest parameter, and the sums that are of the policy's type."""
    number = DTYPE_BYTES["float32" if dtype == "float32" else keeping.master]
    own = trained / ranks
    if stage == 3:
        pieces = max(1, math.ceil(own / SUB_GROUP))
        sums = DTYPE_BYTES["float32" if dtype == "float32" else keeping.gradients]
        return {"optimizer": 3 * number * own, "gradients": pieces * pinned(number * own / pieces) + pinned(sums * own)}
    sums = 0 if widened(dtype, keeping) else DTYPE_BYTES[dtype]
    way = pinned(DTYPE_BYTES[dtype] * own) + pinned(on_the_way(largest, dtype, stage=stage, keeping=keeping))
    return {
        "optimizer": 2 * number * own + pinned(number * own),
        "gradients": pinned(number * own) + sums * own,
        "weights on the way": way,
    }


def device_bytes(machine: MachineFacts, world: WorldPlan) -> float:
    """Of one rank: a GPU, or its part of the machine's memory."""
    if world.device == "cuda":
        return machine.gpu_memory_gib * GIB
    return machine.memory_gib * GIB * world.nodes / world.ranks


def with_replica(
    parameters: int, dtype: str, world: WorldPlan, machine: MachineFacts, keeping: Keeping = PLAIN, *, trained: int | None = None
) -> tuple[float, float, str]:
    """(GiB needed, GiB allowed, the sum as text): stage 3's training state of a rank and a whole copy of the weights beside it."""
    budget = machine.gpu_memory_gib if world.device == "cuda" else machine.memory_gib / world.ranks
    training = training_bytes(parameters, dtype, 3, world.ranks, keeping, trained=trained) / GIB
    replica = DTYPE_BYTES[dtype] * parameters / GIB
    text = f"{replica:.2f} GiB of weights + {training:.2f} GiB of training state = {replica + training:.2f} GiB a rank"
    return replica + training, REPLICA_SHARE * budget, f"{text}, of {REPLICA_SHARE:.0%} of {budget:.0f} GiB"
