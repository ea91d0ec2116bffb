"""Micro-batches: flat trained tokens in one order for both layouts, the same number on every rank, fillers that change nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.runtime.world import SoloWorld
from rftcli.stages import batches
from rftcli.types import Denominators, Experience


def experience(ids: list[int], prompt: int, mask: list[bool] | None = None, **fields: Any) -> Experience:
    trained = torch.tensor([True] * (len(ids) - prompt) if mask is None else mask, dtype=torch.bool)
    return Experience(
        sample=None,  # type: ignore[arg-type]
        token_ids=torch.tensor(ids),
        prompt_tokens=prompt,
        mask=trained,
        advantages=fields.pop("advantages", torch.arange(len(ids) - prompt, dtype=torch.float32)),
        **fields,
    )


TWO = [experience([1, 2, 3, 4, 5], 2, [True, False, True]), experience([6, 7, 8], 1)]
DENOMINATORS = Denominators(tokens=4, sequences=2)


def test_counts_leave_out_what_is_not_trained() -> None:
    """A truncated completion that is masked out leaves numerator and denominator together."""
    masked = experience([1, 2, 3, 4, 5, 6], 1, [False] * 5)
    assert batches.count([experience([1, 2, 3, 4], 1), masked]) == Denominators(tokens=3, sequences=1)
    assert batches.count([]) == Denominators(tokens=0, sequences=0)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_micro_batch(made: SimpleNamespace, layout: str) -> None:
    plan = made.plan(f"batch.layout={layout}").batch
    batch = batches.make_batch(TWO, plan, DENOMINATORS, pad_id=9, device=made.cpu)
    assert batch.target_ids.tolist() == [3, 5, 7, 8] and batch.sequence.tolist() == [0, 0, 1, 1] and batch.num_sequences == 2
    assert batch.advantages.tolist() == [0.0, 2.0, 0.0, 1.0]
    before = batch.input_ids.flatten()[batch.select]
    assert before.tolist() == [2, 4, 6, 7]  # the token in front of each trained one predicts it
    assert batch.denominators is DENOMINATORS and batch.old_logprobs is None and batch.values is None
    if layout == "padded":
        assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 9]]
        assert batch.attention_mask is not None and batch.attention_mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    else:
        assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] and batch.attention_mask is None
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


def test_the_plans_auto_layout_is_padded(made: SimpleNamespace) -> None:
    assert made.plan().batch.layout == "padded"


def test_what_one_row_lacks_the_batch_lacks(made: SimpleNamespace) -> None:
    rows = [replace(TWO[0], old_logprobs=torch.tensor([-1.0, -2.0, -3.0])), replace(TWO[1], old_logprobs=torch.tensor([-4.0, -5.0]))]
    batch = batches.make_batch(rows, made.plan().batch, DENOMINATORS, pad_id=0, device=made.cpu)
    assert batch.old_logprobs is not None and batch.old_logprobs.tolist() == [-1.0, -3.0, -4.0, -5.0]
    mixed = batches.make_batch([rows[0], TWO[1]], made.plan().batch, DENOMINATORS, pad_id=0, device=made.cpu)
    assert mixed.old_logprobs is None


@pytest.mark.parametrize(("rows", "size", "expected"), [(5, 2, [2, 2, 1]), (4, 4, [4]), (4, 9, [4]), (3, 1, [1, 1, 1])])
def test_rows_are_cut_in_order(made: SimpleNamespace, rows: int, size: int, expected: list[int]) -> None:
    experiences = [experience([1, 2, row], 2) for row in range(rows)]
    plan = made.plan(f"batch.micro_batch_size={size}", "batch.prompts_per_step=32").batch
    parts = batches.micro_batches(experiences, plan, DENOMINATORS, SoloWorld(), pad_id=0, device=made.cpu)
    assert [part.num_sequences for part in parts] == expected
    assert [int(token) for part in parts for token in part.target_ids] == list(range(rows))
    assert [part.most_tokens for part in parts] == expected  # one trained token a row


def test_ranks_agree_on_the_number_and_the_size(made: SimpleNamespace) -> None:
    """Five rows on one rank and one on the other: two fillers, in which nothing is trained."""
    mine = [[experience([1, 2, 3, row], 1) for row in range(5)], [experience([1, 2, 3, 4, 5, 6, 7, 8], 2)]]
    plan = made.plan("batch.micro_batch_size=2", "batch.prompts_per_step=32").batch

    def work(world: Any) -> Any:
        return batches.micro_batches(mine[world.rank], plan, DENOMINATORS, world, pad_id=0, device=made.cpu)

    first, second = made.on_ranks(2, work)
    assert [part.target_ids.numel() for part in first] == [6, 6, 3] and [part.target_ids.numel() for part in second] == [6, 0, 0]
    assert [part.most_tokens for part in first] == [part.most_tokens for part in second] == [6, 6, 3]
    filler = second[1]
    assert filler.input_ids.shape == (1, 8) and filler.num_sequences == 1 and filler.advantages.numel() == 0
    assert not mine[1][0].mask.logical_not().any(), "the row that was borrowed for a filler is as it was"


@pytest.mark.parametrize(("layout", "rows", "positions"), [("padded", [1, 2, 1], [8, 10, 3]), ("packed", [1, 1, 2], [8, 5, 7])])
def test_a_token_budget(made: SimpleNamespace, layout: str, rows: list[int], positions: list[int]) -> None:
    """The longest first, three micro-batches of at most ten positions: packed, the largest as small as can be; padded, as little padding."""
    lengths = [5, 8, 3, 4]
    experiences = [experience([row + 1] * length, 1) for row, length in enumerate(lengths)]
    plan = made.plan("batch.tokens_per_micro_batch=10", f"batch.layout={layout}", "batch.prompts_per_step=32").batch
    ordered = batches.by_length(experiences, plan)
    assert [len(item.token_ids) for item in ordered] == [8, 5, 4, 3]
    parts = batches.micro_batches(ordered, plan, DENOMINATORS, SoloWorld(), pad_id=0, device=made.cpu)
    assert [part.num_sequences for part in parts] == rows and [part.input_ids.numel() for part in parts] == positions
    by_rows = made.plan("batch.micro_batch_size=2", f"batch.layout={layout}", "batch.prompts_per_step=32").batch
    parts = batches.micro_batches(batches.by_length(experiences, by_rows), by_rows, DENOMINATORS, SoloWorld(), pad_id=0, device=made.cpu)
    assert [part.input_ids.numel() for part in parts] == {"padded": [16, 8], "packed": [13, 7]}[layout]


def test_rows_of_one_length_go_together(made: SimpleNamespace) -> None:
    """Also where the cut is by rows: 4 x 8 and 4 x 2 positions, and not 8 x 8."""
    experiences = [experience([row + 1] * length, 1) for row, length in enumerate([2, 8] * 4)]
    plan = made.plan("batch.micro_batch_size=4", "batch.prompts_per_step=32").batch
    parts = batches.micro_batches(batches.by_length(experiences, plan), plan, DENOMINATORS, SoloWorld(), pad_id=0, device=made.cpu)
    assert [list(part.input_ids.shape) for part in parts] == [[4, 8], [4, 2]]


def test_padding_is_worth_a_pass_where_it_is_more(made: SimpleNamespace) -> None:
    """On a CPU; the fields of every completion go with it."""
    plan = made.plan("batch.prompts_per_step=32").batch
    assert plan.layout == "padded" and plan.tokens_per_micro_batch > 1000 and plan.pass_cost >= 32
    short, long = [experience([1] * 4, 1) for _ in range(6)], [experience([2] * (4 + 2 * plan.pass_cost), 1) for _ in range(2)]

    def cut(rows: list[Any], of: Any) -> list[list[int]]:
        parts = batches.micro_batches(batches.by_length(rows, of), of, DENOMINATORS, SoloWorld(), pad_id=0, device=made.cpu)
        return [list(part.input_ids.shape) for part in parts]

    assert cut(short + long, plan) == [[2, 4 + 2 * plan.pass_cost], [6, 4]]
    assert cut(short, plan) == [[6, 4]]
    assert cut(short + long, replace(plan, pass_cost=0)) == [[8, 4 + 2 * plan.pass_cost]]


def test_ranks_agree_under_a_token_budget(made: SimpleNamespace) -> None:
    """A rank that would need fewer micro-batches makes smaller ones; only then come fillers."""
    mine = [[experience([1] * 9, 1) for _ in range(4)], [experience([1] * length, 1) for length in (5, 4, 2)]]
    plan = made.plan("batch.tokens_per_micro_batch=10", "batch.prompts_per_step=32").batch

    def work(world: Any) -> Any:
        return batches.micro_batches(mine[world.rank], plan, DENOMINATORS, world, pad_id=0, device=made.cpu)

    first, second = made.on_ranks(2, work)
    assert [part.target_ids.numel() for part in first] == [8, 8, 8, 8]
    assert [part.target_ids.numel() for part in second] == [4, 3, 1, 0]
    assert second[-1].input_ids.shape == (1, 2)  # the shortest row, untrained


def grouped(made: SimpleNamespace, draws: list[int], lengths: list[int], prompt: int = 10) -> list[Experience]:
    found = []
    for number, (draw, length) in enumerate(zip(draws, lengths, strict=True)):
        sample = SimpleNamespace(completion=SimpleNamespace(prompt=SimpleNamespace(draw=draw)))
        found.append(replace(experience([draw + 1] * prompt + [50 + number] * length, prompt), sample=sample))
    return found


def test_groups_lie_together_and_their_prompt_stands_once(made: SimpleNamespace) -> None:
    """The group with the most tokens first, in it the longest first; a budget counts what is really computed."""
    plan = made.plan("batch.share_prompts=true", "batch.tokens_per_micro_batch=34", "batch.prompts_per_step=32").batch
    assert plan.layout == "packed" and plan.share_prompts
    rows = grouped(made, [0, 1, 2, 0, 1, 2], [2, 5, 1, 3, 6, 1])
    by = batches.by_length(rows, plan)
    assert [(int(item.token_ids[0]) - 1, len(item.mask)) for item in by] == [(1, 6), (1, 5), (0, 3), (0, 2), (2, 1), (2, 1)]
    parts = batches.micro_batches(by, plan, DENOMINATORS, SoloWorld(), pad_id=0, device=made.cpu)
    assert [part.num_sequences for part in parts] == [2, 4] and [part.input_ids.numel() for part in parts] == [21, 27]
    assert parts[0].input_ids.tolist() == [[2] * 10 + [54] * 6 + [51] * 5]
    assert parts[0].position_ids[0, 10:].tolist() == [*range(10, 16), *range(10, 15)]
    assert parts[0].select.tolist() == [9, *range(10, 15), 9, *range(16, 20)]
    assert [int(token) for part in parts for token in part.target_ids] == [54] * 6 + [51] * 5 + [53] * 3 + [50] * 2 + [52, 55]


def test_equal_prompts_of_two_draws_stand_apart(made: SimpleNamespace) -> None:
    """A group is a draw, not a text: the same question drawn twice is two groups, one behind the other."""
    plan = made.plan("batch.share_prompts=true", "batch.tokens_per_micro_batch=100", "batch.prompts_per_step=32").batch
    rows = [replace(row, token_ids=torch.cat([torch.full((10,), 7), row.token_ids[10:]])) for row in grouped(made, [0, 1, 0, 1], [4, 3, 2, 1])]
    (part,) = batches.micro_batches(batches.by_length(rows, plan), plan, DENOMINATORS, SoloWorld(), pad_id=0, device=made.cpu)
    assert part.input_ids.tolist() == [[7] * 10 + [50] * 4 + [52] * 2 + [7] * 10 + [51] * 3 + [53]]


def test_a_group_beyond_the_budget_is_split_and_its_prompt_computed_in_each_part(made: SimpleNamespace) -> None:
    plan = made.plan("batch.share_prompts=true", "batch.tokens_per_micro_batch=18", "batch.prompts_per_step=32").batch
    rows = batches.by_length(grouped(made, [0] * 4, [4, 4, 4, 4]), plan)
    parts = batches.micro_batches(rows, plan, DENOMINATORS, SoloWorld(), pad_id=0, device=made.cpu)
    assert [part.input_ids.numel() for part in parts] == [18, 18]


def test_rows_that_nobody_sampled_share_nothing(made: SimpleNamespace) -> None:
    plan = made.plan("batch.share_prompts=true", "batch.tokens_per_micro_batch=100", "batch.prompts_per_step=32").batch
    rows = batches.by_length([experience([1, 2, 3], 2), experience([1, 2, 4], 2)], plan)
    (part,) = batches.micro_batches(rows, plan, DENOMINATORS, SoloWorld(), pad_id=0, device=made.cpu)
    assert part.input_ids.tolist() == [[1, 2, 3, 1, 2, 4]]


def test_temperatures_stand_at_their_tokens(made: SimpleNamespace) -> None:
    """In the order of the trained tokens, in both layouts; without any the batch has none."""
    for layout in ("padded", "packed"):
        plan = made.plan(f"batch.layout={layout}").batch
        rows = [
            Experience(
                sample=made.sample(), token_ids=torch.arange(1, 3 + len(mask)), prompt_tokens=2, mask=torch.tensor(mask),
                advantages=torch.zeros(len(mask)), temperatures=torch.tensor(values),
            )
            for mask, values in (([True, False, True], [4.0, 0.5, 0.5]), ([False, True], [4.0, 0.8]), ([True], [4.0]))
        ]  # fmt: skip
        batch = batches.make_batch(rows, plan, batches.NO_DENOMINATORS, pad_id=0, device=made.cpu)
        assert batch.temperatures is not None and batch.temperatures.tolist() == pytest.approx([4.0, 0.5, 0.8, 4.0])
        plain = batches.make_batch([replace(row, temperatures=None) for row in rows], plan, batches.NO_DENOMINATORS, pad_id=0, device=made.cpu)
        assert plain.temperatures is None
