"""Micro-batches by a budget of tokens, and rollouts of a step: nothing lost, nothing over the budget, as even as the order allows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.batchmath import batch_shape, cheapest_micro_batches, equation, group_micro_batches, rollouts, rollouts_refusal, token_micro_batches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def cost(lengths: list[int], rows: range, padded: bool) -> int:
    chosen = [lengths[row] for row in rows]
    return len(chosen) * max(chosen) if padded else sum(chosen)


@given(LENGTHS, st.integers(1, 200), st.booleans(), st.integers(1, 50))
def test_every_row_once_in_order_within_the_budget(lengths: list[int], budget: int, padded: bool, at_least: int) -> None:
    parts = token_micro_batches(lengths, budget, padded=padded, at_least=at_least)
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    assert all(len(part) == 1 or cost(lengths, part, padded) <= budget for part in parts)
    assert len(parts) >= min(at_least, len(lengths))


@given(LENGTHS, st.integers(1, 200), st.booleans())
def test_as_few_as_the_budget_asks_for_and_as_even_as_the_order_allows(lengths: list[int], budget: int, padded: bool) -> None:
    """Against all cuts into contiguous parts, by dynamic programming."""
    parts = token_micro_batches(lengths, budget, padded=padded)
    fewest = [0] + [len(lengths) + 1] * len(lengths)
    for end in range(1, len(lengths) + 1):
        for start in range(end):
            if end - start == 1 or cost(lengths, range(start, end), padded) <= budget:
                fewest[end] = min(fewest[end], fewest[start] + 1)
    assert len(parts) == fewest[-1]
    largest: dict[tuple[int, int], int] = {(0, 0): 0}
    for end in range(1, len(lengths) + 1):
        for count in range(1, len(parts) + 1):
            values = [
                max(largest[start, count - 1], cost(lengths, range(start, end), padded)) for start in range(end) if (start, count - 1) in largest
            ]
            if values:
                largest[end, count] = min(values)
    best = min(value for (end, _), value in largest.items() if end == len(lengths))
    assert max(cost(lengths, part, padded) for part in parts) == max(best, max(lengths))


def test_the_worked_cases() -> None:
    assert token_micro_batches([], 10, padded=True) == []
    assert token_micro_batches([50, 3, 3], 10, padded=True) == [range(0, 1), range(1, 3)]  # a row beyond the budget goes alone
    assert token_micro_batches([4, 4, 4, 4], 12, padded=False) == [range(0, 2), range(2, 4)]  # 8 + 8, not 12 + 4
    assert len(token_micro_batches([5] * 8, 100, padded=True, at_least=3)) == 3  # as many as another rank needs


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 200), st.integers(1, 80), st.integers(1, 12))
def test_the_cheapest_cut_against_all_cuts(lengths: list[int], budget: int, pass_cost: int, at_least: int) -> None:
    def price(parts: list[range]) -> int:
        return sum(cost(lengths, part, True) + pass_cost for part in parts)

    def all_cuts() -> Iterator[list[range]]:
        for marks in itertools.product((False, True), repeat=len(lengths) - 1):
            ends = [*(place + 1 for place, mark in enumerate(marks) if mark), len(lengths)]
            parts = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
            if all(len(part) == 1 or cost(lengths, part, True) <= budget for part in parts):
                yield parts

    parts = cheapest_micro_batches(lengths, budget, pass_cost)
    assert parts in list(all_cuts()) and price(parts) == min(map(price, all_cuts()))
    more = cheapest_micro_batches(lengths, budget, pass_cost, at_least=at_least)
    assert [row for part in more for row in part] == list(range(len(lengths))) and len(more) == max(len(parts), min(at_least, len(lengths)))
    assert cheapest_micro_batches([], budget, pass_cost, at_least=at_least) == []


GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 20), min_size=1, max_size=5)), min_size=1, max_size=8)


def shared_cost(lengths: list[int], saved: list[int], rows: range) -> int:
    return sum(lengths[row] for row in rows) - sum(saved[row] for row in rows[1:])


@given(GROUPS, st.integers(1, 200), st.integers(1, 20))
def test_groups_stay_whole_where_they_fit(groups: list[tuple[int, list[int]]], budget: int, at_least: int) -> None:
    """Every row once and in order, within the budget; only a group that alone is more than it is cut, unless another rank needs more pieces."""
    lengths = [prompt + length for prompt, completions in groups for length in completions]
    saved = [prompt if place else 0 for prompt, completions in groups for place in range(len(completions))]
    parts = group_micro_batches(lengths, saved, budget, at_least=at_least)
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    assert all(len(part) == 1 or shared_cost(lengths, saved, part) <= budget for part in parts)
    assert len(parts) >= min(at_least, len(lengths))
    alone = group_micro_batches(lengths, saved, budget)
    starts = {part.start for part in alone}
    first = 0
    for prompt, completions in groups:
        inside = starts & set(range(first + 1, first + len(completions)))
        assert not inside or prompt + sum(completions) > budget
        first += len(completions)


def test_shared_prompts_in_numbers() -> None:
    """Two groups of three: a prompt of 10 and completions of 4. A group is 22 tokens, two completions of it 18."""
    lengths, saved = [14] * 6, [0, 10, 10] * 2
    assert group_micro_batches(lengths, saved, 44) == [range(0, 6)]
    assert group_micro_batches(lengths, saved, 43) == [range(0, 3), range(3, 6)]
    assert group_micro_batches(lengths, saved, 18) == [range(0, 2), range(2, 3), range(3, 5), range(5, 6)]
    assert group_micro_batches(lengths, saved, 44, at_least=2) == [range(0, 3), range(3, 6)]
    assert len(group_micro_batches(lengths, saved, 44, at_least=5)) == 5
    shape = batch_shape(4, 3, 1, 1, 2, None, tokens_per_micro_batch=44, share_prompts=True)
    assert equation(shape).endswith("(micro-batches of at most 44 tokens, a group's prompt once in each)")


def test_rollouts_of_a_step() -> None:
    assert [list(part) for part in rollouts([1, 2, 3, 4], 2)] == [[1, 2], [3, 4]]
    assert [list(part) for part in rollouts([1, 2], 1)] == [[1, 2]]


@pytest.mark.parametrize(
    ("prompts", "updates", "count", "ranks", "fits"),
    [(32, 1, 4, 8, True), (32, 1, 8, 8, False), (32, 1, 3, None, False), (32, 2, 1, 2, True), (32, 2, 2, 2, False), (500, 1, 6, 5, False)],
)
def test_which_rollouts_fit(prompts: int, updates: int, count: int, ranks: int | None, fits: bool) -> None:
    refusal = rollouts_refusal(prompts, updates, count, ranks)
    assert (refusal is None) is fits


def test_refusals_name_what_fits() -> None:
    assert "Nearest that fit: 5 or 10" in str(rollouts_refusal(500, 1, 6, 5))
    assert "either several rollouts make one update" in str(rollouts_refusal(32, 2, 2, 2))


def test_equations() -> None:
    shape = batch_shape(32, 8, 1, 2, 2, None, rollouts_per_update=4, tokens_per_micro_batch=8192)
    assert equation(shape) == (
        "4 rollouts x 8 prompts x 8 samples = 256 completions a step = 1 update x 2 ranks x 128 rows (micro-batches of at most 8192 tokens), "
        "2 epochs = 2 optimizer updates a step"
    )
