"""The trainer's state on another number of ranks: the same weights and moments to the last bit, and the same next update up to rounding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

CASES = [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("float32", "bfloat16") if stage or dtype == "float32"]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, str], tuple[Any, list[Any]]]:
    """(ranks before, stage, dtype) -> what was saved, and what the ranks of the other count made of it."""
    found = {}
    for before, after in ((2, 1), (1, 2)):
        folders = {case: str(tmp_path_factory.mktemp("from") / "trainer") for case in CASES}
        saves = {f"{s}-{d}": ("save_state", {"zero": s, "dtype": d, "folder": folders[s, d]}) for s, d in CASES}
        loads = {f"{s}-{d}": ("load_state", {"zero": s, "dtype": d, "folder": folders[s, d], "written_by": before}) for s, d in CASES}
        saved, loaded = on_ranks(before, saves), on_ranks(after, loads)
        for stage, dtype in CASES:
            found[before, stage, dtype] = (saved[f"{stage}-{dtype}"][0], loaded[f"{stage}-{dtype}"])
    return found


@pytest.mark.parametrize(("stage", "dtype"), CASES)
@pytest.mark.parametrize("before", [2, 1])
def test_nothing_is_lost_on_the_way(moved: Any, before: int, stage: int, dtype: str) -> None:
    saved, ranks = moved[before, stage, dtype]
    for loaded in ranks:
        assert loaded["loaded"].pop("steps") == {2.0}
        assert set(loaded["loaded"]) == set(saved["saved"]) - {"steps"}
        for name, parts in loaded["loaded"].items():
            for part, (mine, theirs) in zip(("weights", "first moment", "second moment"), zip(parts, saved["saved"][name], strict=True), strict=True):
                assert torch.equal(mine, theirs), (name, part)
            working = loaded["live"][name].reshape(-1)
            assert torch.equal(working, saved["saved"][name][0].to(working.dtype)), name
    assert len(ranks[0]["files"]) > 0


@pytest.mark.parametrize(("stage", "dtype"), CASES)
@pytest.mark.parametrize("before", [2, 1])
def test_the_next_update_is_the_same(moved: Any, before: int, stage: int, dtype: str) -> None:
    saved, ranks = moved[before, stage, dtype]
    for name, parts in ranks[0]["after"].items():
        if name == "steps":
            assert parts == {3.0}
            continue
        moved_by = (saved["after"][name][0] - saved["saved"][name][0]).abs().max()
        far = (parts[0] - saved["after"][name][0]).abs().max()
        assert far <= (1e-3 if dtype == "float32" else 0.3) * moved_by + 1e-7, (name, far, moved_by)
