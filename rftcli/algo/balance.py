"""Which rank works on what, so that none waits long for another: whole numbers and costs, no torch.

What it leaves out: what an item is, what it costs, and how it travels (`stages.spread`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

TOLERANCE = 0.02
"""Where the fullest rank has at most so much more than it must, nothing travels."""


def fair_shares(costs: Sequence[float], homes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item: the dearest first, each to the rank that has least (Graham 1969, https://doi.org/10.1137/0117039: the fullest rank
    gets at most 4/3 - 1/(3 ranks) of what the best division gives it). Shares then go to the ranks that hold most of them already. Items that cost
    nothing stay at home, and so does everything where ranks are even within `TOLERANCE`, or no division found is better. The same on every rank.

    >>> fair_shares([8, 7, 2, 1], [0, 0, 1, 1], 2)
    [0, 1, 1, 0]
    >>> fair_shares([5, 5, 5, 5], [0, 0, 1, 1], 2)
    [0, 0, 1, 1]
    """
    assert len(costs) == len(homes) and all(0 <= home < ranks for home in homes), (len(costs), len(homes), ranks)
    before = fullest(costs, homes, ranks)
    if before <= (1 + TOLERANCE) * max(sum(costs) / ranks, max(costs, default=0)):
        return list(homes)
    load = [(0.0, share) for share in range(ranks)]
    share_of = {}
    for item in sorted((item for item, cost in enumerate(costs) if cost > 0), key=lambda item: (-costs[item], item)):
        total, share = heapq.heappop(load)
        share_of[item] = share
        heapq.heappush(load, (total + costs[item], share))
    if max(total for total, _ in load) >= before:
        return list(homes)
    rank_of = _ranks_of_shares(costs, homes, share_of, ranks)
    return [rank_of[share_of[item]] if item in share_of else home for item, home in enumerate(homes)]


def fullest(costs: Sequence[float], places: Sequence[int], ranks: int) -> float:
    """What the rank with most has."""
    return max(loads(costs, places, ranks))


def loads(costs: Sequence[float], places: Sequence[int], ranks: int) -> list[float]:
    """What each rank has."""
    found = [0.0] * ranks
    for cost, place in zip(costs, places, strict=True):
        found[place] += cost
    return found


def _ranks_of_shares(costs: Sequence[float], homes: Sequence[int], share_of: dict[int, int], ranks: int) -> list[int]:
    """Share -> rank: one after another, the pair of which most need not travel."""
    at_home: dict[tuple[int, int], float] = {}
    for item, share in share_of.items():
        pair = (share, homes[item])
        at_home[pair] = at_home.get(pair, 0.0) + costs[item]
    found: dict[int, int] = {}
    taken: set[int] = set()
    for share, rank in sorted(at_home, key=lambda pair: (-at_home[pair], pair)):
        if share not in found and rank not in taken:
            found[share] = rank
            taken.add(rank)
    free = iter(rank for rank in range(ranks) if rank not in taken)
    return [found[share] if share in found else next(free) for share in range(ranks)]
