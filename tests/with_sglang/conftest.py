"""Tests with the real SGLang, in an environment of its own. The usual suite does not come here."""

from __future__ import annotations

import pytest
from engine_runs import environment, rft

pytest.importorskip("sglang", reason="an environment with SGLang has it")
__all__ = ["environment", "rft"]
