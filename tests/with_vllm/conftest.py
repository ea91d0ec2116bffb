"""Tests with the real vLLM: `make test-vllm`, in an environment of its own. The usual suite does not come here.

Models are tiny, everything runs on a CPU; an engine takes 10 to 40 seconds to start, so one is shared by a module's tests.
"""

from __future__ import annotations

import pytest
from engine_runs import environment, rft

pytest.importorskip("vllm", reason="`make test-vllm` has it")
__all__ = ["environment", "rft"]
