"""Tests on an NVIDIA GPU: `python -m pytest -W default tests/with_cuda`, where the extra `liger` is installed. The usual suite does not come here."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("liger_kernel", reason="pip install 'rftcli[liger]'")
if not torch.cuda.is_available():
    pytest.skip("these tests need an NVIDIA GPU", allow_module_level=True)
