"""What estimators read of a step, gathered over all ranks in one fixed order, so that advantages have the same bits on any number of them.

A completion travels as a few numbers. Those without a reward are absent. What it leaves out: the estimators, and tokens (`token_credit`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rftcli.errors import RftError
from rftcli.protocols import World
from rftcli.types import Group, ScoredSample

Estimator = Callable[[Mapping[str, Any]], Sequence[float]]
"""A user's estimator: the fields of `own_record` -> one number for each completion. It raises RftError for what is no such thing."""
PENALTY = "penalty"
"""Name of the part that holds what was added to the sum of the parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One scored completion."""

    draw: int
    sample: int
    label: str
    reward: float
    """Before any baseline, after a KL term of the whole answer."""
    trained_tokens: int
    greedy: float | None
    """Reward of the greedy twin, where there is one."""
    parts: tuple[tuple[str, float, float | None], ...]
    """(name, weight, score or None for a part that abstained), parts of weight 0 left out."""


def scored_completions(groups: Sequence[Group], world: World, penalties: Mapping[tuple[int, int], float]) -> list[Scored]:
    """Every scored completion of the step on any rank, by draw and sample. `penalties`: what is taken from this rank's rewards. Collective."""
    mine = [
        Scored(
            draw=group.prompt.draw,
            sample=sample.completion.sample,
            label=group.prompt.label,
            reward=sample.reward - penalties.get((group.prompt.draw, sample.completion.sample), 0.0),
            trained_tokens=_trained_tokens(sample),
            greedy=None if group.greedy is None else group.greedy.reward,
            parts=_parts(sample),
        )
        for group in groups
        for sample in group.samples
        if sample.reward is not None
    ]
    return sorted((item for part in world.gather(mine) for item in part), key=lambda item: (item.draw, item.sample))


def estimator_inputs(scored: Sequence[Scored], names: Sequence[str], world: World, estimator: Estimator | None) -> list[torch.Tensor]:
    """The inputs of an estimator by its names (`algo.advantages.Advantage.inputs`). Collective for `own`."""
    found = []
    for name in names:
        if name == "own":
            found.append(_own_values(scored, world, estimator))
        elif name in ("scores", "present", "weights"):
            found.append(_part_table(scored)[name])
        else:
            column, dtype = COLUMNS[name]
            found.append(torch.tensor([column(item) for item in scored], dtype=dtype))
    return found


def _trained_tokens(sample: ScoredSample) -> int:
    trace = sample.completion.trace
    return len(trace.ids) if trace.mask is None else sum(trace.mask)


def _parts(sample: ScoredSample) -> tuple[tuple[str, float, float | None], ...]:
    """The parts of a reward, and what its shaping added as one more."""
    parts = tuple((part.name, part.weight, part.value) for part in sample.parts if part.weight)
    added = 0.0 if sample.shaped is None else sample.shaped.penalty
    return (*parts, (PENALTY, 1.0, added)) if added else parts


def _part_table(scored: Sequence[Scored]) -> dict[str, torch.Tensor]:
    """scores, present, weights (C, P): the parts by name. A completion without a penalty has one of 0; a part of another label's is absent."""
    names = sorted({name for item in scored for name, _, _ in item.parts})
    rows = [{name: (weight, value) for name, weight, value in item.parts} for item in scored]
    blank = {name: (1.0, 0.0 if name == PENALTY else None) for name in names}
    table = [[{**blank, **row}[name] for name in names] for row in rows]
    shape = (len(scored), len(names))
    return {
        "scores": torch.tensor([[value or 0.0 for _, value in row] for row in table], dtype=torch.float64).reshape(shape),
        "present": torch.tensor([[value is not None for _, value in row] for row in table], dtype=torch.bool).reshape(shape),
        "weights": torch.tensor([[weight for weight, _ in row] for row in table], dtype=torch.float64).reshape(shape),
    }


def own_record(scored: Sequence[Scored]) -> dict[str, Any]:
    """What a user's estimator may ask for; C completions in the order of draw and sample."""
    table = _part_table(scored)
    names = sorted({name for item in scored for name, _, _ in item.parts})
    scores = torch.where(table["present"], table["scores"], torch.nan)
    return {
        "rewards": torch.tensor([item.reward for item in scored], dtype=torch.float64),
        "group": torch.tensor([item.draw for item in scored], dtype=torch.int64),
        "sample": torch.tensor([item.sample for item in scored], dtype=torch.int64),
        "lengths": torch.tensor([item.trained_tokens for item in scored], dtype=torch.int64),
        "parts": {name: scores[:, index] for index, name in enumerate(names)},
        "weights": {name: table["weights"][:, index] for index, name in enumerate(names)},
        "labels": [item.label for item in scored],
    }


def _own_values(scored: Sequence[Scored], world: World, estimator: Estimator | None) -> torch.Tensor:
    """(C,) of the user's function, which rank 0 calls for all: it need not give the same twice. RftError on every rank alike."""
    assert estimator is not None, "`kind: python` has a function"
    answer: tuple[Sequence[float] | None, str, str | None] = (None, "", None)
    if world.rank == 0:
        try:
            answer = (estimator(own_record(scored)), "", None)
        except RftError as error:
            answer = (None, error.message, error.hint)
    values, message, hint = world.gather(answer)[0]
    if values is None:
        raise RftError(message, hint=hint)
    return torch.tensor(values, dtype=torch.float64)


# How to add one: a name that a row of ADVANTAGES asks for -> what a completion gives, and the number type of the vector (C,).
COLUMNS: dict[str, tuple[Callable[[Scored], Any], torch.dtype]] = {
    "rewards": (lambda item: item.reward, torch.float64),
    "group": (lambda item: item.draw, torch.int64),
    "lengths": (lambda item: item.trained_tokens, torch.int64),
    "greedy_rewards": (lambda item: item.greedy, torch.float64),
}
