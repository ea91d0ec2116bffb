"""`train.deterministic`: an operation without a repeatable kernel is an error that names it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch, os
from rftcli.runtime.determinism import make_deterministic
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
