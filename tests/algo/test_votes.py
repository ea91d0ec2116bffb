"""Majority votes against every subset counted one by one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.algo.votes import vote_at_k


def by_hand(answers: list[str | None], scores: list[float], k: int) -> float:
    """The mean over all subsets of the mean score of the answers with the most votes."""
    of = {answer: [s for a, s in zip(answers, scores, strict=True) if a == answer] for answer in answers}
    mean = {answer: sum(values) / len(values) for answer, values in of.items()}
    outcomes = []
    for subset in itertools.combinations(answers, k):
        votes = Counter(answer for answer in subset if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())] or [None]
        outcomes.append(sum(mean[winner] for winner in winners) / len(winners))
    return sum(outcomes) / len(outcomes)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.sampled_from([0.0, 0.1, 1.0, -2.0])), min_size=1, max_size=8), st.data())
def test_equal_to_counting_all_subsets(rows: list[tuple[str | None, float]], data: st.DataObject) -> None:
    answers, scores = [row[0] for row in rows], [row[1] for row in rows]
    k = data.draw(st.integers(1, len(rows)))
    assert vote_at_k(answers, scores, k) == pytest.approx(by_hand(answers, scores, k), abs=1e-12)
    assert vote_at_k(answers, scores, 1) == pytest.approx(sum(scores) / len(scores), abs=1e-12)  # one vote is the mean


@pytest.mark.parametrize(
    ("answers", "scores", "k", "expected"),
    [
        ("aab", [1, 1, 0], 3, 1.0),
        ("aab", [1, 1, 0], 2, 2 / 3),  # aa wins, ab and ba tie
        ("aabb", [1, 1, 0, 0], 4, 0.5),
        ("abcd", [1, 0, 0, 0], 4, 0.25),  # a four-way tie
        ("aaabb", [0, 0, 0, 1, 1], 5, 0.0),  # the majority may be wrong
    ],
)
def test_numbers(answers: str, scores: list[float], k: int, expected: float) -> None:
    assert vote_at_k(list(answers), scores, k) == pytest.approx(expected)


def test_no_answer_is_no_vote() -> None:
    assert vote_at_k([None, None, None, "a"], [0, 0, 0, 1], 4) == 1.0
    assert vote_at_k([None, None], [0.25, 0.75], 2) == 0.5


def test_sixty_four_samples_are_quick() -> None:
    answers = [str(index % 11) for index in range(64)]
    scores = [float(answer == "3") for answer in answers]
    assert 0 < vote_at_k(answers, scores, 32) < 1
    assert vote_at_k([str(index) for index in range(64)], [1.0] + [0.0] * 63, 32) == pytest.approx(1 / 64)
