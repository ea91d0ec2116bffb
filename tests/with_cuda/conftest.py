"""Tests on an NVIDIA GPU: `python -m pytest -W default tests/with_cuda`, with the extra `liger` installed. The usual suite does not come here."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.exit("these tests need an NVIDIA GPU", returncode=2)
