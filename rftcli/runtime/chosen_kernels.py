"""Which kernels torch may choose. `train.deterministic`: only those whose results repeat; an operation that has none is an error that names it."""

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


def attend_to_new_shapes() -> None:
    """No attention of cuDNN's: it builds a plan for every new shape of a pass, and where answers end by themselves every pass has one."""
    torch.backends.cuda.enable_cudnn_sdp(False)
