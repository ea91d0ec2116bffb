"""Parcels between ranks over a real process group: each to one rank, as it was sent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import on_ranks

RANKS = 3


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    return on_ranks(RANKS, {name: (name, {}) for name in ("parcels", "nothing", "own")}, "exchange_work.py")


def sent(rank: int, place: int) -> Any:
    kinds = (None, f"{rank} to {place}", {"ids": list(range(1000 * (rank + 1))), "mask": [True] * place})
    return kinds[(rank + place) % 3]


def test_each_rank_gets_what_was_sent_to_it(told: dict[str, list[Any]]) -> None:
    for place in range(RANKS):
        assert told["parcels"][place] == [sent(rank, place) for rank in range(RANKS)]


def test_empty_parcels_arrive_too(told: dict[str, list[Any]]) -> None:
    assert told["nothing"] == [[[]] * RANKS] * RANKS


def test_what_stays_is_not_copied(told: dict[str, list[Any]]) -> None:
    assert told["own"] == [True] * RANKS
