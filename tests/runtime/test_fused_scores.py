"""Whether scores are read by kernels is one decision of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rftcli.runtime import models
from rftcli.runtime.models import fused_scores


class Said:
    def __init__(self) -> None:
        self.warnings: list[tuple[str, str]] = []

    def warn(self, code: str, text: str) -> None:
        self.warnings.append((code, text))


class Ranks:
    """Two ranks, of which the other says what it is told to."""

    def __init__(self, other: str | None) -> None:
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_no_kernels_and_no_warning_without_a_gpu() -> None:
    said = Said()
    assert not fused_scores(Ranks("no GPU"), torch.device("cpu"), said)  # type: ignore[arg-type]
    assert said.warnings == []


@pytest.mark.parametrize("other", [None, "ImportError: no compiler"])
def test_one_rank_without_kernels_decides_for_all(other: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "kernels_work", lambda device: None)  # a GPU, which is not here
    said = Said()
    assert fused_scores(Ranks(other), torch.device("cuda"), said) is (other is None)  # type: ignore[arg-type]
    assert [code for code, _ in said.warnings] == ([] if other is None else ["plain_scores"])
    assert all("no compiler" in text for _, text in said.warnings)
