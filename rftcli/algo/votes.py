"""Majority votes, exactly: the expected score of the most frequent answer among k completions drawn without replacement from n.

No resampling and no first-k: every subset of size k counts alike, so the estimate is unbiased and has no chance in it. No torch. It leaves out what
an answer is and when two are the same; they come as keys.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache


def vote_at_k(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """maj@k of one prompt. `answers[i]`: key of what completion i answered, None where it answered nothing; `scores[i]`: its reward.

    The score of an answer is the mean reward of the completions that gave it. Answers with equally many votes share the win: each counts with the
    same chance. A completion without an answer does not vote; where none of the k has an answer, the vote scores as those do on average. So maj@1
    is the mean.

    >>> vote_at_k(["4", "4", "5"], [1.0, 1.0, 0.0], 3), round(vote_at_k(["4", "5", None], [1.0, 0.0, 0.0], 2), 6)
    (1.0, 0.5)
    """
    assert len(answers) == len(scores) and 1 <= k <= len(answers), f"need 1 <= k <= n of both, got {len(answers)}, {len(scores)}, k={k}"
    members: dict[Hashable | None, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        members.setdefault(answer, []).append(score)
    silent = members.pop(None, [])
    counts = tuple(sorted(map(len, members.values())))
    chance = winning_chances(counts, len(silent), k)
    terms = [chance[len(given)] * math.fsum(given) / len(given) for given in members.values()]
    if silent:
        terms.append(math.comb(len(silent), k) / math.comb(len(answers), k) * math.fsum(silent) / len(silent))
    return math.fsum(terms)


@lru_cache(maxsize=4096)
def winning_chances(counts: tuple[int, ...], silent: int, k: int) -> dict[int, float]:
    """Size of a class of answers -> the chance that one class of that size wins the vote of k completions, ties shared. Classes of the same size have
    the same chance. `counts`: sizes of all classes; `silent`: completions without an answer.

    Whole numbers up to one division: for each number of votes j of the class, subsets in which every other class has at most j, by the number of
    classes that have exactly j.
    """
    subsets = math.comb(sum(counts) + silent, k)
    chances = {}
    for own in sorted(set(counts)):
        others = list(counts)
        others.remove(own)
        total = 0.0
        for votes in range(1, min(own, k) + 1):
            ways = _others(tuple(others), silent, votes, k - votes)
            total += math.comb(own, votes) * math.fsum(count / (ties + 1) for ties, count in ways.items()) / subsets
        chances[own] = total
    return chances


def _others(counts: tuple[int, ...], silent: int, most: int, size: int) -> dict[int, int]:
    """Ties -> ways to choose `size` completions from the other classes, none with more than `most` votes and `ties` of them with exactly `most`."""
    ways = {(chosen, 0): math.comb(silent, chosen) for chosen in range(min(silent, size) + 1)}  # (chosen so far, ties so far) -> ways
    for count in counts:
        grown: dict[tuple[int, int], int] = {}
        for (chosen, ties), number in ways.items():
            for votes in range(min(count, most, size - chosen) + 1):
                state = (chosen + votes, ties + (votes == most))
                grown[state] = grown.get(state, 0) + number * math.comb(count, votes)
        ways = grown
    return {ties: number for (chosen, ties), number in ways.items() if chosen == size}
