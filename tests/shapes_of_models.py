"""Facts of a model that no device holds whole, and of one that any does."""

from __future__ import annotations

from typing import Any

LARGE: dict[str, Any] = {
    "parameters": 72_000_000_000, "layers": 80, "hidden": 8192, "vocabulary": 152064, "key_width": 1024, "query_width": 8192, "inner": 29568,
    "heads": 64, "max_positions": 32768, "file_dtype": "bfloat16",
}  # fmt: skip
SMALL: dict[str, Any] = {**LARGE, "parameters": 500_000_000, "layers": 2}
