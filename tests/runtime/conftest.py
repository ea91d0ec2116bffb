"""Shared by tests of commands in a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def eight_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with `rows.jsonl`, no GPU in sight, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
