"""Index arithmetic of the padded and the packed layout."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.align import Inputs, Row, flatten, packed, padded, shared, unflatten
from rftcli.types import Batch

PAD = 0


def row(ids: list[int], prompt_tokens: int, mask: list[bool] | None = None) -> Row:
    mask = [True] * (len(ids) - prompt_tokens) if mask is None else mask
    return Row(torch.tensor(ids, dtype=torch.int64), prompt_tokens, torch.tensor(mask, dtype=torch.bool))


ROWS = [row([11, 12, 13, 14, 15], 2, [True, False, True]), row([21, 22], 1), row([31, 32, 33], 3), row([41, 42], 1, [False])]


def test_padded() -> None:
    inputs = padded(ROWS, PAD)
    assert inputs.input_ids.tolist() == [[11, 12, 13, 14, 15], [21, 22, 0, 0, 0], [31, 32, 33, 0, 0], [41, 42, 0, 0, 0]]
    assert inputs.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 4
    assert inputs.select.tolist() == [1, 3, 5]
    assert inputs.target_ids.tolist() == [13, 15, 22]
    assert inputs.sequence.tolist() == [0, 0, 1]
    assert inputs.num_sequences == 4


def test_packed() -> None:
    inputs = packed(ROWS)
    assert inputs.input_ids.tolist() == [[11, 12, 13, 14, 15, 21, 22, 31, 32, 33, 41, 42]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 0, 1]]
    assert inputs.attention_mask is None
    assert inputs.select.tolist() == [1, 3, 5]
    assert inputs.target_ids.tolist() == [13, 15, 22]
    assert inputs.sequence.tolist() == [0, 0, 1]
    assert inputs.num_sequences == 4


def test_shared() -> None:
    """Prompts of one group stand once; the first token of each of its completions is predicted at the prompt's last place."""
    group = [row([11, 12, 13, 14, 15], 2, [True, False, True]), row([11, 12], 2), row([11, 12, 16, 17], 2), row([11, 12, 18], 2)]
    rows = [*(each._replace(group=7) for each in group), row([31, 32, 33], 3), row([11, 12, 41], 2)._replace(group=8)]
    inputs = shared(rows)
    assert inputs.input_ids.tolist() == [[11, 12, 13, 14, 15, 16, 17, 18, 31, 32, 33, 11, 12, 41]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 2, 0, 1, 2, 0, 1, 2]]
    assert inputs.select.tolist() == [1, 3, 1, 5, 1, 12]
    assert inputs.target_ids.tolist() == [13, 15, 16, 17, 18, 41]
    assert inputs.sequence.tolist() == [0, 0, 2, 2, 3, 5]
    assert inputs.ends.tolist() == [4, 1, 6, 7, 10, 13]
    assert inputs.attention_mask is None and inputs.num_sequences == 6


def test_rows_share_nothing_without_a_group_or_with_another_prompt() -> None:
    same = [row([11, 12, 13], 2), row([11, 12, 14], 2)]
    others = [row([11, 12, 13], 2)._replace(group=1), row([11, 19, 13], 2)._replace(group=1)]
    for rows in (same, [same[0]._replace(group=1), same[1]._replace(group=2)], others):
        for name in ("input_ids", "position_ids", "select", "target_ids", "sequence", "ends"):
            assert torch.equal(getattr(shared(rows), name), getattr(packed(rows), name)), name


def test_the_last_token_of_each_row() -> None:
    assert padded(ROWS, PAD).ends.tolist() == [4, 6, 12, 16]
    assert packed(ROWS).ends.tolist() == [4, 6, 9, 11]


def test_the_end_token_is_trained_and_padding_is_not() -> None:
    """Also where an answer fills its whole length, and where the padding token is the end token."""
    end = 2
    inputs = padded([row([7, 8, end], 1), row([7, 5, 6, 9], 1)], pad_id=end)
    assert inputs.target_ids.tolist() == [8, end, 5, 6, 9]
    assert inputs.select.tolist() == [0, 1, 4, 5, 6]


@pytest.mark.parametrize("build", [lambda rows: padded(rows, PAD), packed])
def test_no_trained_token(build) -> None:
    inputs = build([row([31, 32, 33], 3), row([41, 42], 1, [False])])
    for tensor in (inputs.select, inputs.target_ids, inputs.sequence):
        assert tensor.shape == (0,) and tensor.dtype == torch.int64
    assert inputs.num_sequences == 2


@st.composite
def row_lists(draw: st.DrawFn) -> list[Row]:
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        prompt, mask = draw(st.lists(st.integers(1, 99), min_size=1, max_size=5)), draw(st.lists(st.booleans(), max_size=6))
        rows.append(row(prompt + draw(st.lists(st.integers(1, 99), min_size=len(mask), max_size=len(mask))), len(prompt), mask))
    return rows


@given(row_lists())
def test_layouts_agree_and_lose_nothing(rows: list[Row]) -> None:
    layouts = [padded(rows, PAD), packed(rows)]
    trained = [each.token_ids[each.prompt_tokens :][each.mask] for each in rows]
    before = [each.token_ids[each.prompt_tokens - 1 : -1][each.mask] if len(each.mask) else trained[0][:0] for each in rows]
    for inputs in layouts:
        assert torch.equal(inputs.target_ids, torch.cat(trained))
        assert torch.equal(inputs.input_ids.flatten()[inputs.select], torch.cat(before))
        assert inputs.sequence.tolist() == [index for index, ids in enumerate(trained) for _ in ids]
        assert inputs.input_ids.dtype == inputs.position_ids.dtype == inputs.select.dtype == inputs.sequence.dtype == torch.int64
    real = layouts[0].attention_mask.bool()
    for name in ("input_ids", "position_ids"):
        assert torch.equal(getattr(layouts[0], name)[real], getattr(layouts[1], name)[0])
    positions = [inputs.position_ids.flatten()[inputs.select] for inputs in layouts]
    assert torch.equal(*positions)


@given(row_lists(), st.integers(1, 4))
def test_shared_prompts_lose_nothing(rows: list[Row], copies: int) -> None:
    """Each row of a group predicts the tokens of its own packed row from the same ids before them."""
    grouped = [each._replace(group=number) for number, each in enumerate(rows) for _ in range(copies)]
    one, other = packed(grouped), shared(grouped)
    for name in ("target_ids", "sequence"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    for name in ("input_ids", "position_ids"):
        first, second = getattr(one, name).flatten(), getattr(other, name).flatten()
        assert torch.equal(first[one.select], second[other.select]) and torch.equal(first[one.ends], second[other.ends])
    saved = sum(each.prompt_tokens for each in rows) * (copies - 1)
    assert other.input_ids.numel() == one.input_ids.numel() - saved


@given(row_lists())
def test_flatten_follows_the_selection(rows: list[Row]) -> None:
    masks = [each.mask for each in rows]
    ids = flatten([each.token_ids[each.prompt_tokens :] for each in rows], masks)
    assert torch.equal(ids, packed(rows).target_ids)
    vectors = unflatten(ids, masks)
    assert [vector.shape for vector in vectors] == [mask.shape for mask in masks]
    assert all((vector[~mask] == 0).all() for vector, mask in zip(vectors, masks, strict=True))
    assert torch.equal(flatten(vectors, masks), ids)


def test_masked_entries_cannot_leak() -> None:
    mask = torch.tensor([True, False, True])
    assert flatten([torch.tensor([1.0, torch.nan, 2.0])], [mask]).tolist() == [1.0, 2.0]
    assert unflatten(torch.tensor([1.0, 2.0]), [mask])[0].tolist() == [1.0, 0.0, 2.0]


def test_lists_that_do_not_match() -> None:
    mask = torch.tensor([True, False])
    with pytest.raises(ValueError, match="zip"):
        flatten([torch.zeros(2)], [mask, mask])
    with pytest.raises(AssertionError, match="3 values for 2 trained tokens"):
        unflatten(torch.zeros(3), [mask, mask])
    for wrong in (row([1, 2, 3], 1, [True]), row([1], 0, [True])):
        with pytest.raises(AssertionError):
            packed([wrong])
    with pytest.raises(AssertionError, match="without rows"):
        packed([])


def test_fields_are_those_of_a_batch() -> None:
    batch = {item.name: item.type for item in dataclasses.fields(Batch)}
    assert {item.name for item in dataclasses.fields(Inputs)} <= set(batch)
