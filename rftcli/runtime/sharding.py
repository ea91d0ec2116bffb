"""A frozen model partitioned over the ranks: DeepSpeed's ZeRO-3 without an optimizer.

Its layers are gathered as a forward pass reaches them, so every rank makes equally many passes. Leaves out trained models (`learner`).
"""

from __future__ import annotations

from typing import Any

import torch

from rftcli.runtime.learner import cut, deepspeed
from rftcli.runtime.whole_layers import gather_whole_layers


def partitioned(model: torch.nn.Module, dtype: str, device: torch.device) -> Any:
    """Collective. The whole `model` is in the memory of every rank's machine before, and a part of each weight on `device` afterwards."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
        "bf16": {"enabled": dtype == "bfloat16"},
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
    gather_whole_layers(model)
    cut(model, config, device)
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    engine.eval()
    return engine
