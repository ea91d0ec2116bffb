"""The DeepSpeed configuration of a plan. Everything in it follows from the plan; nothing is left to DeepSpeed's defaults that matters.

DeepSpeed's own averaging over ranks and accumulation steps is undone by the learner, which scales each micro-batch's loss by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BUCKET_ELEMENTS = 50_000_000
"""Elements of one reduction bucket: large enough for bandwidth, 200 MB in float32."""


SHORT = {"float32": "fp32", "bfloat16": "bf16"}
"""DeepSpeed's names of number types."""


def build(
    *,
    stage: int,
    dtype: str,
    ranks: int,
    max_grad_norm: float | None,
    master: str = "float32",
    gradients: str = "float32",
    reduce: str = "float32",
    offload_optimizer: str = "none",
    offload_parameters: str = "none",
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A configuration for `deepspeed.initialize`. `dtype`: the policy's; the next three are for bfloat16 alone. `extra` is merged last, deeply."""
    config: dict[str, Any] = {
        "train_batch_size": ranks,  # only their ratio matters: micro-batches, accumulation and scale are the learner's
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    if dtype == "bfloat16":
        config["data_types"] = {"grad_accum_dtype": SHORT[gradients]}
        config["communication_data_type"] = SHORT[reduce]
        if master == "bfloat16":
            config["bf16"].update(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    if stage in (1, 2):
        config["zero_optimization"].update(
            overlap_comm=False, contiguous_gradients=True, reduce_bucket_size=BUCKET_ELEMENTS, allgather_bucket_size=BUCKET_ELEMENTS
        )
    if stage == 3:
        config["zero_optimization"].update(
            overlap_comm=False,
            contiguous_gradients=True,
            reduce_bucket_size=BUCKET_ELEMENTS,
            stage3_prefetch_bucket_size=BUCKET_ELEMENTS,
            stage3_param_persistence_threshold=100_000,
            stage3_gather_16bit_weights_on_model_save=True,
        )
    if offload_optimizer != "none":
        config["zero_optimization"]["offload_optimizer"] = {"device": offload_optimizer, "pin_memory": True}
        config["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW works on CPU tensors too, and needs no compiler on the machine
    if offload_parameters != "none":
        config["zero_optimization"]["offload_param"] = {"device": offload_parameters, "pin_memory": True}
    return merged(config, extra or {})


def merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> merged({"zero": {"stage": 2, "bucket": 1}}, {"zero": {"bucket": 2}, "timers": {}})
    {'zero': {'stage': 2, 'bucket': 2}, 'timers': {}}
    """
    result = dict(base)
    for name, value in extra.items():
        below = result.get(name)
        result[name] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
