"""The DeepSpeed configuration of a plan. Everything in it follows from the plan; nothing is left to DeepSpeed's defaults that matters.

DeepSpeed's own averaging over ranks and accumulation steps is undone by the learner, which scales each micro-batch's loss by the number of ranks.
"""

from __future__ import annotations

from typing import Any

BUCKET_ELEMENTS = 50_000_000
"""Elements of one reduction bucket: large enough for bandwidth, 200 MB in float32."""


def build(*, stage: int, dtype: str, ranks: int, max_grad_norm: float | None) -> dict[str, Any]:
    """A configuration for `deepspeed.initialize`. `dtype`: float32, or bfloat16 with float32 master weights and gradients."""
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
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
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
    return config
