"""Kernels that torch may choose: with `train.deterministic` an operation without a repeatable one is an error that names it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch, os
from rftcli.runtime.chosen_kernels import make_deterministic
def unrepeatable():
    torch.empty(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
unrepeatable()
make_deterministic()
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and torch.are_deterministic_algorithms_enabled()
assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
try:
    unrepeatable()
except RuntimeError as error:
    print(error)
"""


def test_what_does_not_repeat_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert "put_" in done.stdout and "deterministic" in done.stdout


def test_attention_that_plans_for_every_shape_is_off_where_lengths_vary() -> None:
    code = "import torch; from rftcli.runtime.chosen_kernels import attend_to_new_shapes as f; f(); print(torch.backends.cuda.cudnn_sdp_enabled())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
