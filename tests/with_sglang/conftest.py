"""Tests with the real SGLang, in an environment of its own. The usual suite does not come here."""

from __future__ import annotations

import os

import pytest
from engine_runs import environment, rft

from rftcli.runtime.sglang_engine import CPU_ENGINE

pytest.importorskip("sglang", reason="an environment with SGLang has it")
os.environ.setdefault(CPU_ENGINE, "1")
__all__ = ["environment", "rft"]
