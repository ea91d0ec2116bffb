"""How the completions of a step are cut into updates, ranks and micro-batches. Whole numbers only, no torch.

A step draws P prompts (one group of G completions each). A keyed permutation of the groups is cut into U mini-batches, each of which makes one
optimizer update per epoch; inside a mini-batch the groups are dealt to the ranks one by one. A rank works through its rows in micro-batches, of
which the last may be smaller. The one rule: P divides by U x ranks, so that every rank holds whole groups, and equally many, in every mini-batch.
Micro-batches need no rule: they are cut by rows, or by a budget of tokens.

With U = 1 the step's prompts may be generated in K rollouts, one after another with the same weights, before the one update of each epoch. Then P
divides by K x ranks too. It bounds what the engine holds at once, and changes no number of the update.

What it leaves out: how large a micro-batch may be (that depends on memory) and which rank generated a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rftcli.algo.keyed import keyed_permutation

Item = TypeVar("Item")

_LISTED_MICRO_BATCHES = 4
"""Up to so many micro-batches an equation lists them one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The six numbers a step is cut by, and what follows from them.

    >>> shape = batch_shape(32, 8, 2, 1, 2, 24)
    >>> shape.rows_per_rank, shape.micro_batch_rows
    (64, (24, 24, 16))
    """

    prompts_per_step: int
    samples_per_prompt: int
    updates_per_step: int
    epochs: int
    ranks: int
    micro_batch_size: int | None
    """Most rows of a micro-batch; None: all rows of a rank in one."""
    rollouts_per_update: int = 1
    tokens_per_micro_batch: int | None = None
    """Most tokens of a micro-batch of more than one row; None: micro-batches are cut by rows."""
    share_prompts: bool = False
    """A group's prompt stands once in a micro-batch."""

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def optimizer_updates_per_step(self) -> int:
        """Mini-batches times epochs."""
        return self.updates_per_step * self.epochs

    @property
    def groups_per_update(self) -> int:
        """Groups of one mini-batch, all ranks."""
        return self.prompts_per_step // self.updates_per_step

    @property
    def groups_per_rank(self) -> int:
        """Groups of one rank in one mini-batch."""
        return self.groups_per_update // self.ranks

    @property
    def rows_per_rank(self) -> int:
        """Completions of one rank in one mini-batch."""
        return self.groups_per_rank * self.samples_per_prompt

    @property
    def micro_batch_rows(self) -> tuple[int, ...]:
        """Rows of each micro-batch of one rank in one update; the last may be smaller."""
        return tuple(len(rows) for rows in micro_batches(self.rows_per_rank, self.micro_batch_size or self.rows_per_rank))


def batch_shape(
    prompts_per_step: int,
    samples_per_prompt: int,
    updates_per_step: int,
    epochs: int,
    ranks: int,
    micro_batch_size: int | None,
    *,
    rollouts_per_update: int = 1,
    tokens_per_micro_batch: int | None = None,
    share_prompts: bool = False,
) -> BatchShape:
    """The shape of a step. The numbers must fit (ask `refusal` and `rollouts_refusal` first)."""
    assert min(samples_per_prompt, epochs) >= 1, (samples_per_prompt, epochs)
    assert micro_batch_size is None or micro_batch_size >= 1, micro_batch_size
    why_not = refusal(prompts_per_step, updates_per_step, ranks)
    assert why_not is None, why_not
    why_not = rollouts_refusal(prompts_per_step, updates_per_step, rollouts_per_update, ranks)
    assert why_not is None, why_not
    return BatchShape(
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
        updates_per_step=updates_per_step,
        epochs=epochs,
        ranks=ranks,
        micro_batch_size=micro_batch_size,
        rollouts_per_update=rollouts_per_update,
        tokens_per_micro_batch=tokens_per_micro_batch,
        share_prompts=share_prompts,
    )


def equation(shape: BatchShape) -> str:
    """The shape as a person checks it.

    >>> equation(batch_shape(32, 8, 2, 1, 2, 24))
    '32 prompts x 8 samples = 256 completions a step = 2 updates x 2 ranks x 64 rows (micro-batches of 24: 24 + 24 + 16)'
    """
    text = (
        f"{counted(shape.prompts_per_step, 'prompt')} x {counted(shape.samples_per_prompt, 'sample')} = "
        f"{counted(shape.completions_per_step, 'completion')} a step = "
        f"{counted(shape.updates_per_step, 'update')} x {counted(shape.ranks, 'rank')} x {counted(shape.rows_per_rank, 'row')}"
    )
    if shape.rollouts_per_update > 1:
        each = shape.prompts_per_step // shape.rollouts_per_update
        prefix = f"{shape.rollouts_per_update} rollouts x {counted(each, 'prompt')} x {counted(shape.samples_per_prompt, 'sample')}"
        text = f"{prefix} = {text.partition(' = ')[2]}"
    shared = ", a group's prompt once in each" if shape.share_prompts else ""
    if shape.tokens_per_micro_batch is not None:
        text += f" (micro-batches of at most {counted(shape.tokens_per_micro_batch, 'token')}{shared})"
    elif shape.micro_batch_size is not None:
        text += f" ({_micro_batch_text(shape.micro_batch_size, shape.micro_batch_rows)}{shared})"
    if shape.epochs > 1:
        text += f", {shape.epochs} epochs = {shape.optimizer_updates_per_step} optimizer updates a step"
    return text


def divides(prompts_per_step: int, updates_per_step: int, ranks: int) -> bool:
    """Whether every rank gets whole groups, and equally many, in every mini-batch."""
    assert min(prompts_per_step, updates_per_step, ranks) >= 1, (prompts_per_step, updates_per_step, ranks)
    return prompts_per_step % (updates_per_step * ranks) == 0


def nearest_prompts(prompts_per_step: int, updates_per_step: int, ranks: int) -> list[int]:
    """The number itself if it fits, else the next below (if there is one) and the next above.

    >>> nearest_prompts(500, 1, 6)
    [498, 504]
    """
    if divides(prompts_per_step, updates_per_step, ranks):
        return [prompts_per_step]
    unit = updates_per_step * ranks
    below = prompts_per_step // unit * unit
    return [value for value in (below, below + unit) if value > 0]


def valid_updates(prompts_per_step: int, ranks: int) -> list[int]:
    """Every `updates_per_step` that fits, ascending; empty if the prompts do not divide by the ranks at all."""
    return [updates for updates in range(1, prompts_per_step // ranks + 1) if divides(prompts_per_step, updates, ranks)]


def valid_ranks(prompts_per_step: int, updates_per_step: int, up_to: int) -> list[int]:
    """Every number of ranks up to `up_to` that fits, ascending; empty if the prompts do not divide by the updates at all."""
    most = min(up_to, prompts_per_step // updates_per_step)
    return [ranks for ranks in range(1, most + 1) if divides(prompts_per_step, updates_per_step, ranks)]


def refusal(prompts_per_step: int, updates_per_step: int, ranks: int | None) -> str | None:
    """Why the numbers do not fit, with the rule and the nearest values that do; None if they fit.

    `ranks` None: the number of ranks is not known yet, and only the cut into updates is judged.

    >>> refusal(32, 2, 4) is None
    True
    """
    known = 1 if ranks is None else ranks
    if divides(prompts_per_step, updates_per_step, known):
        return None
    if ranks is None:
        rule = f"must be a multiple of updates_per_step ({updates_per_step}), because every mini-batch is made of whole groups"
    else:
        rule = (
            f"must be a multiple of updates_per_step x ranks ({updates_per_step} x {ranks} = {updates_per_step * ranks}), "
            "because every rank trains on whole groups in every mini-batch"
        )
    choices = [
        ("prompts_per_step", nearest_prompts(prompts_per_step, updates_per_step, known)),
        ("updates_per_step", _nearest(valid_updates(prompts_per_step, known), updates_per_step)),
    ]
    if ranks is not None:
        choices.append(("ranks", _nearest(valid_ranks(prompts_per_step, updates_per_step, prompts_per_step), ranks)))
    offers = [f"{name} {' or '.join(map(str, values))}" for name, values in choices if values]
    return f"prompts_per_step {rule}; got {prompts_per_step}. Nearest that fit, changing one number: {'; '.join(offers)}"


def rollouts_refusal(prompts_per_step: int, updates_per_step: int, rollouts_per_update: int, ranks: int | None) -> str | None:
    """Why the step's prompts cannot be generated in so many rollouts; None if they can.

    >>> rollouts_refusal(32, 1, 3, 2)
    'rollouts_per_update must divide prompts_per_step / ranks (32 / 2 = 16), because every rollout has whole groups, and equally many, on every \
rank; got 3. Nearest that fit: 2 or 4'
    """
    if rollouts_per_update == 1:
        return None
    if updates_per_step > 1:
        return (
            f"rollouts_per_update must be 1 with several updates per step, got {rollouts_per_update} with updates_per_step {updates_per_step}: "
            "either several rollouts make one update, or one rollout makes several"
        )
    groups = prompts_per_step // (ranks or 1)
    if groups % rollouts_per_update == 0:
        return None
    size = f"prompts_per_step / ranks ({prompts_per_step} / {ranks} = {groups})" if ranks is not None else f"prompts_per_step ({prompts_per_step})"
    nearest = " or ".join(map(str, _nearest([count for count in range(1, groups + 1) if groups % count == 0], rollouts_per_update)))
    return (
        f"rollouts_per_update must divide {size}, because every rollout has whole groups, and equally many, on every rank; "
        f"got {rollouts_per_update}. Nearest that fit: {nearest}"
    )


def group_order(seed: int, step: int, groups: int) -> list[int]:
    """The keyed permutation of a step's groups (0..groups-1): position -> group."""
    return keyed_permutation("group_order", seed, step, n=groups)


def groups_of_rank(seed: int, step: int, prompts_per_step: int, updates_per_step: int, ranks: int, rank: int) -> list[list[int]]:
    """One rank's groups, a list for every mini-batch, in the order in which they are worked through: permuted position j lies in mini-batch
    j // (P/U), and there position i on rank i % ranks. It is the same in every epoch, so that data stay where they are."""
    assert divides(prompts_per_step, updates_per_step, ranks), (prompts_per_step, updates_per_step, ranks)
    assert 0 <= rank < ranks, (rank, ranks)
    order, size = group_order(seed, step, prompts_per_step), prompts_per_step // updates_per_step
    return [order[start : start + size][rank::ranks] for start in range(0, prompts_per_step, size)]


def micro_batches(rows: int, size: int) -> list[range]:
    """Row indices of each micro-batch, in order; the last may be smaller.

    >>> micro_batches(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    assert rows >= 0 and size >= 1, (rows, size)
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def token_micro_batches(
    lengths: Sequence[int], budget: int, *, padded: bool, at_least: int = 1, saved: Sequence[int] | None = None
) -> list[range]:
    """Row indices of each micro-batch, in order, so that none costs more than `budget` tokens unless it is a single row.

    A micro-batch costs its positions: rows x longest row in the padded layout, the sum of the rows in the packed one, where a row costs `saved`
    fewer behind the one before it. Rows stay in their order: sorted by length they waste least. There are as few micro-batches as the budget asks
    for, or `at_least` where there are as many rows, and they are as even as the order allows: the largest costs as little as it can.

    >>> token_micro_batches([9, 8, 4, 4, 3], 18, padded=True)
    [range(0, 2), range(2, 5)]
    >>> token_micro_batches([9, 8, 4, 4, 3], 100, padded=False)
    [range(0, 5)]
    >>> token_micro_batches([9, 8, 4, 4, 3], 100, padded=False, at_least=2)
    [range(0, 2), range(2, 5)]
    """
    assert budget >= 1 and at_least >= 1 and all(length >= 1 for length in lengths), (budget, at_least)
    if not lengths:
        return []
    saved = saved or [0] * len(lengths)
    count = max(len(_greedy(lengths, budget, padded, saved)), min(at_least, len(lengths)))
    low, high = 1, budget  # the smallest budget that needs no more than `count` lies in low..high
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(lengths, middle, padded, saved)) <= count:
            high = middle
        else:
            low = middle + 1
    return _halved(_greedy(lengths, low, padded, saved), count)  # the even cut may come out with fewer


def cheapest_micro_batches(lengths: Sequence[int], budget: int, pass_cost: int, *, at_least: int = 1) -> list[range]:
    """Row indices of each micro-batch of padded rows, in order and within the budget: the cut that costs least, where a micro-batch costs rows x
    longest row and `pass_cost` positions more. `at_least` so many where there are as many rows.

    >>> cheapest_micro_batches([9, 8, 4, 4, 3], 100, 5)
    [range(0, 2), range(2, 5)]
    >>> cheapest_micro_batches([9, 8, 4, 4, 3], 100, 50)
    [range(0, 5)]
    """
    least, begins = [0.0], [0]
    for end in range(1, len(lengths) + 1):
        longest, best, begin = 0, math.inf, end - 1
        for start in range(end - 1, -1, -1):
            longest = max(longest, lengths[start])
            positions = (end - start) * longest
            if positions > budget and end - start > 1:
                break
            if (total := least[start] + positions + pass_cost) < best:
                best, begin = total, start
        least.append(best)
        begins.append(begin)
    parts: list[range] = []
    end = len(lengths)
    while end:
        parts.insert(0, range(begins[end], end))
        end = begins[end]
    return _halved(parts, min(at_least, len(lengths)))


def _halved(parts: list[range], count: int) -> list[range]:
    """The parts with the most rows cut in two, until there are so many."""
    parts = list(parts)
    while len(parts) < count:
        widest = max(range(len(parts)), key=lambda index: len(parts[index]))
        whole = parts[widest]
        middle = (whole.start + whole.stop) // 2
        parts[widest : widest + 1] = [range(whole.start, middle), range(middle, whole.stop)]
    return parts


def group_micro_batches(lengths: Sequence[int], saved: Sequence[int], budget: int, *, at_least: int = 1, pass_cost: int = 0) -> list[range]:
    """`token_micro_batches` of packed rows that cuts between groups where it can: a row belongs to the group of the one before it where it saves
    something behind it. A group that alone is more than the budget is cut inside, and so are groups where there are fewer than `at_least` pieces, or
    where that saves passes that cost more, at `pass_cost` tokens each beside their own, than what is computed again.

    >>> group_micro_batches([9, 8, 9, 8], [0, 6, 0, 6], 24)
    [range(0, 4)]
    >>> group_micro_batches([9, 8, 9, 8], [0, 6, 0, 6], 21)
    [range(0, 2), range(2, 4)]
    >>> group_micro_batches([8, 8, 8] * 3, [0, 4, 4] * 3, 28, pass_cost=10)
    [range(0, 5), range(5, 9)]
    """
    anywhere = token_micro_batches(lengths, budget, padded=False, saved=saved, at_least=at_least)
    starts = [row for row in range(len(lengths)) if not saved[row]]
    pieces: list[range] = []
    for start, end in zip(starts, [*starts[1:], len(lengths)], strict=True):
        own = [0, *saved[start + 1 : end]]
        cuts = token_micro_batches(lengths[start:end], budget, padded=False, saved=own)
        pieces += [range(start + rows.start, start + rows.stop) for rows in cuts]
    if len(pieces) < at_least:
        return anywhere
    together = token_micro_batches([_shared_cost(lengths, saved, piece) for piece in pieces], budget, padded=False, at_least=at_least)
    whole = [range(pieces[part.start].start, pieces[part.stop - 1].stop) for part in together]
    return min(whole, anywhere, key=lambda parts: sum(_shared_cost(lengths, saved, part) + pass_cost for part in parts))


def _shared_cost(lengths: Sequence[int], saved: Sequence[int], rows: range) -> int:
    """Tokens of a micro-batch: its first row has its prompt in any case."""
    return sum(lengths[row] for row in rows) - sum(saved[row] for row in rows[1:])


def _greedy(lengths: Sequence[int], budget: int, padded: bool, saved: Sequence[int]) -> list[range]:
    """From the left, each micro-batch as long as the budget allows, and at least one row."""
    parts, start, longest, total = [], 0, 0, 0
    for index, length in enumerate(lengths):
        longest, total = max(longest, length), total + length - (saved[index] if index > start else 0)
        if index > start and ((index + 1 - start) * longest if padded else total) > budget:
            parts.append(range(start, index))
            start, longest, total = index, length, length
    return [*parts, range(start, len(lengths))]


def rollouts(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """A rank's requests of a step, cut evenly into its rollouts. The number divides (`rollouts_refusal`)."""
    size = len(items) // count
    assert size * count == len(items), (len(items), count)
    return [items[start : start + size] for start in range(0, len(items), size)]


def _nearest(values: Iterable[int], target: int) -> list[int]:
    """The largest value below and the smallest above the target, as far as there are any."""
    values = list(values)
    return [*[value for value in values if value < target][-1:], *[value for value in values if value > target][:1]]


def _micro_batch_text(size: int, rows: tuple[int, ...]) -> str:
    if len(rows) == 1:
        return f"one micro-batch of {rows[0]}"
    if len(rows) <= _LISTED_MICRO_BATCHES:
        return f"micro-batches of {size}: {' + '.join(map(str, rows))}"
    full = rows.count(size)
    rest = "" if rows[-1] == size else f" + {rows[-1]}"
    return f"micro-batches of {size}: {full} x {size}{rest}"


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "row"), counted(12, "row")
    ('1 row', '12 rows')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
