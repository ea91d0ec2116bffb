"""Scorers whose weights are partitioned, on two real ranks: the scores of one rank, with and without rows, beside a partitioned policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from rftcli.builtin import builtin_path

    folder, quickstart = tmp_path_factory.mktemp("scorers"), str(builtin_path("quickstart"))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(quickstart)
    config.num_labels, config.initializer_range = 3, 0.3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(quickstart).save_pretrained(folder / "model")
    classifier = f"{{kind: classifier, path: {folder / 'model'}, head: 'h[0] - h[2]', shard: true}}"
    judge = f"{{kind: generative, path: {quickstart}, prompt: '{{{{ completion }}}}', score: {{token: '3', against: ['4']}}, shard: true}}"
    calls: dict[str, Any] = {}
    for kind, recipe in (("classifier", classifier), ("judge", judge)):
        for zero in (None, 3):
            calls[f"{kind} {zero}"] = ("scored", {"folder": str(folder), "recipe": recipe, "beside_zero": zero, "batch_tokens": 60})
    return {size: on_ranks(size, calls, "scorers_work.py") for size in (1, 2)}


@pytest.mark.parametrize("kind", ["classifier", "judge"])
@pytest.mark.parametrize("zero", [None, 3])
def test_partitioned_scores_are_those_of_one_rank(results: dict[int, dict[str, Any]], kind: str, zero: int | None) -> None:
    (whole, _), = results[1][f"{kind} {zero}"]
    (first, _), (second, _) = results[2][f"{kind} {zero}"]
    everything = whole[0]
    assert len(everything) == 5 and all(isinstance(value, float) for value in everything)
    expected = [[everything, everything, []], [everything[1:], [], everything[:2]]]
    for mine, theirs in ((first, expected[0]), (second, expected[1])):
        for found, value in zip(mine, theirs, strict=True):
            assert found == pytest.approx(value, abs=1e-5)


def test_each_rank_holds_a_part(results: dict[int, dict[str, Any]]) -> None:
    (_, whole), = results[1]["classifier None"]
    assert whole > 0
    for _, here in results[2]["classifier None"]:
        assert here == 0  # the tensors are empty between passes: DeepSpeed holds the parts
