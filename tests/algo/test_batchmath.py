"""Cutting a step into updates, ranks and micro-batches."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.batchmath import (
    BatchShape,
    batch_shape,
    divides,
    equation,
    group_order,
    groups_of_rank,
    micro_batches,
    nearest_prompts,
    refusal,
    valid_ranks,
    valid_updates,
)

SMALL = st.integers(1, 6)


def test_shape_of_a_step() -> None:
    shape = batch_shape(32, 8, 2, 3, 2, 24)
    assert (shape.completions_per_step, shape.groups_per_update, shape.groups_per_rank, shape.rows_per_rank) == (256, 16, 8, 64)
    assert shape.micro_batch_rows == (24, 24, 16)
    assert shape.optimizer_updates_per_step == 6
    assert BatchShape(**dataclasses.asdict(shape)) == shape


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (32, 8, 2, 1, 2, 24),
            "32 prompts x 8 samples = 256 completions a step = 2 updates x 2 ranks x 64 rows (micro-batches of 24: 24 + 24 + 16)",
        ),
        ((1, 1, 1, 1, 1, 4), "1 prompt x 1 sample = 1 completion a step = 1 update x 1 rank x 1 row (one micro-batch of 1)"),
        (
            (8, 4, 1, 2, 2, None),
            "8 prompts x 4 samples = 32 completions a step = 1 update x 2 ranks x 16 rows, 2 epochs = 2 optimizer updates a step",
        ),
        ((64, 8, 1, 1, 1, 10), "64 prompts x 8 samples = 512 completions a step = 1 update x 1 rank x 512 rows (micro-batches of 10: 51 x 10 + 2)"),
        ((64, 8, 1, 1, 1, 64), "64 prompts x 8 samples = 512 completions a step = 1 update x 1 rank x 512 rows (micro-batches of 64: 8 x 64)"),
    ],
)
def test_equation(arguments: tuple, text: str) -> None:
    assert equation(batch_shape(*arguments)) == text


@given(SMALL, SMALL, SMALL, SMALL, SMALL, st.none() | st.integers(1, 40))
def test_nothing_is_lost(groups: int, samples: int, updates: int, epochs: int, ranks: int, size: int | None) -> None:
    shape = batch_shape(groups * updates * ranks, samples, updates, epochs, ranks, size)
    assert shape.updates_per_step * shape.ranks * sum(shape.micro_batch_rows) == shape.completions_per_step
    assert shape.rows_per_rank % samples == 0
    assert all(rows == shape.micro_batch_rows[0] for rows in shape.micro_batch_rows[:-1])
    assert 0 < shape.micro_batch_rows[-1] <= (size or shape.rows_per_rank)


@given(st.integers(0, 100), st.integers(1, 12))
def test_micro_batches_cover_the_rows_in_order(rows: int, size: int) -> None:
    assert [row for batch in micro_batches(rows, size) for row in batch] == list(range(rows))
    assert all(1 <= len(batch) <= size for batch in micro_batches(rows, size))


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [((500, 1, 6), [498, 504]), ((200, 3, 7), [189, 210]), ((5, 4, 2), [8]), ((48, 4, 2), [48])],
)
def test_nearest_prompts(arguments: tuple, nearest: list) -> None:
    assert nearest_prompts(*arguments) == nearest


@given(st.integers(1, 300), SMALL, SMALL)
def test_nearest_prompts_fit_and_are_nearest(prompts: int, updates: int, ranks: int) -> None:
    fitting = [n for n in range(1, prompts + updates * ranks + 1) if divides(n, updates, ranks)]
    below, above = [n for n in fitting if n <= prompts], [n for n in fitting if n >= prompts]
    assert nearest_prompts(prompts, updates, ranks) == sorted({*below[-1:], *above[:1]})


def test_valid_values() -> None:
    assert valid_ranks(12, 2, up_to=8) == [1, 2, 3, 6]
    assert valid_ranks(12, 2, up_to=2) == [1, 2]
    assert valid_ranks(12, 5, up_to=8) == []
    assert valid_updates(12, 2) == [1, 2, 3, 6]
    assert valid_updates(500, 6) == []
    assert valid_updates(4, 8) == []


def test_refusal_gives_the_rule_and_the_ways_out() -> None:
    text = refusal(500, 1, 6)
    assert text == (
        "prompts_per_step must be a multiple of updates_per_step x ranks (1 x 6 = 6), because every rank trains on whole groups in every "
        "mini-batch; got 500. Nearest that fit, changing one number: prompts_per_step 498 or 504; ranks 5 or 10"
    )
    assert "prompts_per_step 189 or 210" in refusal(200, 3, 7)
    assert refusal(24, 4, 4).endswith("prompts_per_step 16 or 32; updates_per_step 3 or 6; ranks 3 or 6")
    assert refusal(4, 1, 8).endswith("prompts_per_step 8; ranks 4")


def test_refusal_without_a_number_of_ranks() -> None:
    text = refusal(10, 3, None)
    assert text.startswith("prompts_per_step must be a multiple of updates_per_step (3), because every mini-batch is made of whole groups; got 10.")
    assert text.endswith("prompts_per_step 9 or 12; updates_per_step 2 or 5")
    assert refusal(10, 5, None) is None


@given(st.integers(1, 120), SMALL, SMALL)
def test_refusal_agrees_with_the_rule(prompts: int, updates: int, ranks: int) -> None:
    fits = divides(prompts, updates, ranks)
    assert (refusal(prompts, updates, ranks) is None) == fits
    assert (updates in valid_updates(prompts, ranks)) == fits
    assert (ranks in valid_ranks(prompts, updates, up_to=100)) == fits
    if not fits:
        with pytest.raises(AssertionError, match="must be a multiple"):
            batch_shape(prompts, 1, updates, 1, ranks, None)


@given(st.integers(0, 5), st.integers(0, 5), SMALL, SMALL, SMALL)
def test_every_group_has_one_rank_and_ranks_have_equally_many(seed: int, step: int, groups: int, updates: int, ranks: int) -> None:
    prompts = groups * updates * ranks
    shares = [groups_of_rank(seed, step, prompts, updates, ranks, rank) for rank in range(ranks)]
    assert all([len(part) for part in mine] == [groups] * updates for mine in shares)
    assert sorted(group for mine in shares for part in mine for group in part) == list(range(prompts))


def test_groups_follow_the_permutation() -> None:
    order = group_order(3, 9, 12)
    assert groups_of_rank(3, 9, 12, 2, 3, 0) == [[order[0], order[3]], [order[6], order[9]]]
    assert groups_of_rank(3, 9, 12, 2, 3, 1) == [[order[1], order[4]], [order[7], order[10]]]
    assert groups_of_rank(3, 9, 12, 2, 3, 2) == [[order[2], order[5]], [order[8], order[11]]]


def test_mini_batches_do_not_depend_on_the_number_of_ranks() -> None:
    one = groups_of_rank(0, 1, 24, 3, 1, 0)
    four = [groups_of_rank(0, 1, 24, 3, 4, rank) for rank in range(4)]
    assert [set(part) for part in one] == [{group for mine in four for group in mine[number]} for number in range(3)]
    orders = {tuple(group_order(seed, step, 24)) for seed in range(3) for step in range(3)}
    assert len(orders) == 9
