from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks


@pytest.fixture(scope="package", autouse=True)
def _ranks_leave() -> Iterator[None]:
    yield
    ranks.leave()
