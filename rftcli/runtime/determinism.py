"""`train.deterministic`: only kernels whose results repeat. An operation that has none is an error that names it."""

from __future__ import annotations

import os

import torch

CUBLAS_WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: what cuBLAS needs to give the same bits each time (its documentation, "Results reproducibility")."""


def make_deterministic() -> None:
    """Call before the first CUDA kernel: cuBLAS reads its variable once."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
