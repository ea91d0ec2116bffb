"""Estimators beyond grpo and rloo: the numbers of their definitions. Formulas in plain Python and properties: `test_estimator_properties`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
import torch

from rftcli.algo.advantages import ADVANTAGES
from rftcli.algo.answer_advantages import distill, own, reinforce, remax
from rftcli.algo.group_advantages import centred, gdpo, gpg, grpo, grpo_passk, opo
from rftcli.algo.returns import gae


def one_group(*rewards: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rewards, dtype=torch.float64), torch.full((len(rewards),), 7)


def near(*values: float) -> object:
    return pytest.approx(list(values), abs=1e-6)


# Numbers of the definitions


def test_opo_in_numbers() -> None:
    rewards, group = one_group(1, 0, 0, 0)
    assert opo(rewards, group, torch.tensor([10, 1, 1, 1])).tolist() == near(0.230769, *[-0.769231] * 3)
    assert opo(rewards, group, torch.tensor([5, 5, 5, 5])).tolist() == near(0.75, *[-0.25] * 3)  # equal lengths: the mean
    assert opo(rewards, group, torch.tensor([0, 2, 2, 0])).tolist() == near(1.0, 0.0, 0.0, 0.0)
    assert opo(rewards, group, torch.zeros(4, dtype=torch.int64)).tolist() == near(0.75, *[-0.25] * 3)  # no token is trained: the plain mean


def test_gpg_in_numbers() -> None:
    rewards, group = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1]), torch.tensor([3] * 4 + [9] * 4)
    assert gpg(rewards, group).tolist() == near(1.5, *[-0.5] * 3, *[0.0] * 4)
    assert gpg(*one_group(1, 1, 1)).tolist() == [0.0] * 3  # no group with spread: 0, and no division by it
    assert gpg(torch.tensor([1.0, 0, 2, 0]), torch.tensor([0, 0, 1, 1])).tolist() == near(0.5, -0.5, 1, -1)
    assert gpg(torch.tensor([1.0, 0, 0.3]), torch.tensor([0, 0, 1])).tolist() == near(1.0, -1.0, 0.0)  # one scored completion is a group as well


def test_grpo_passk_in_numbers() -> None:
    assert grpo_passk(*one_group(0.2, 1, 0.4, 0)).tolist() == near(0, 0.6, 0, 0)
    assert grpo_passk(*one_group(1, 1, 0.4, 0)).tolist() == [0.0] * 4
    assert grpo_passk(*one_group(0.1 + 0.2, 0.3, 0, 0)).tolist() == [0.0] * 4  # a tie but for rounding
    assert grpo_passk(*one_group(1)).tolist() == [0.0]
    deviation = statistics.stdev([0.2, 1, 0.4, 0])
    assert grpo_passk(*one_group(0.2, 1, 0.4, 0), normalise_std=True).tolist() == near(0, 0.6 / (deviation + 1e-4), 0, 0)


def test_centred_in_numbers() -> None:
    assert centred(*one_group(1, 0, 0, 0)).tolist() == near(0.75, *[-0.25] * 3)
    assert centred(*one_group(*[0.1] * 8)).tolist() == [0.0] * 8


def test_remax_in_numbers() -> None:
    assert remax(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.5, 0.5, 0.5])).tolist() == [0.5, -0.5, 0.0]
    third = torch.tensor([0.1 + 0.2] * 3, dtype=torch.float64)
    assert remax(third, torch.tensor([0.3] * 3, dtype=torch.float64)).tolist() == [0.0] * 3
    assert remax(torch.tensor([1.0] * 3), torch.zeros(3)).tolist() == [1.0] * 3  # all better than the greedy one: not a group baseline


def test_reinforce_with_a_baseline_in_numbers() -> None:
    assert reinforce(torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1]), baseline="batch").tolist() == near(0.25, -0.75, -0.75, *[0.25] * 5)
    assert reinforce(torch.full((8,), 0.1, dtype=torch.float64), baseline="batch").tolist() == [0.0] * 8
    assert reinforce(torch.tensor([3.0])).tolist() == [3.0] and reinforce(torch.tensor([3.0]), baseline="batch").tolist() == [0.0]


def parts(*columns: Sequence[float | None], weights: Sequence[float] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = list(zip(*columns, strict=True))
    scores = torch.tensor([[value or 0.0 for value in row] for row in rows], dtype=torch.float64)
    present = torch.tensor([[value is not None for value in row] for row in rows])
    return scores, present, torch.tensor([weights or [1.0] * len(columns)] * len(rows), dtype=torch.float64)


def test_gdpo_in_numbers() -> None:
    """Before whitening the parts 1,0,0,0 and 1,1,0,0 are grpo of each, added up; a part that abstained counts 0 and moves no mean."""
    group = torch.zeros(4, dtype=torch.int64)
    first, second = grpo(torch.tensor([1.0, 0, 0, 0]), group), grpo(torch.tensor([1.0, 1, 0, 0]), group)
    found = gdpo(*parts([1, 0, 0, 0], [1, 1, 0, 0]), group)
    assert found.tolist() == near(*(first + second).tolist())
    assert found.tolist() == pytest.approx([2.36557, 0.36599, -1.36578, -1.36578], abs=1e-4)
    weighted = gdpo(*parts([1, 0, 0, 0], [1, 1, 0, 0], weights=[0.5, -2.0]), group)
    assert weighted.tolist() == near(*(0.5 * first - 2 * second).tolist())
    abstained = gdpo(*parts([1, 0, 0, 0], [1, None, 0, None]), group)
    pair = grpo(torch.tensor([1.0, 0.0]), group[:2])
    assert abstained.tolist() == near(*(first + torch.tensor([pair[0], 0.0, pair[1], 0.0])).tolist())
    assert gdpo(*parts([0.1] * 4, [None] * 4), group).tolist() == [0.0] * 4


def test_distill_in_numbers() -> None:
    old, teacher = torch.tensor([-1.0, -2.0, -0.5, -100.0, 0.0]), torch.tensor([-0.5, -3.0, -0.5, 0.0, -torch.inf])
    assert distill(old, teacher, coefficient=0.1).tolist() == near(0.05, -0.1, 0.0, 2.0, -2.0)
    assert distill(torch.zeros(0), torch.zeros(0), coefficient=1.0).numel() == 0


def test_gae_goes_on_behind_a_cut() -> None:
    """V behind the last token joins delta there: 0 for the answer that ended, 0.4 for the one that was cut."""
    rewards, values = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0.5, 0.7, 0.5, 0.7])
    sequence = torch.tensor([0, 0, 1, 1])
    ended, cut = gae(rewards, values, sequence, torch.tensor([0.0, 0.4]), gamma=0.9, lam=0.5).split(2)
    assert ended.tolist() == near(0.13 + 0.45 * 0.3, 0.3) and cut.tolist() == near(0.13 + 0.45 * 0.66, 0.66)
    assert gae(rewards, values, sequence).tolist() == gae(rewards, values, sequence, torch.zeros(2)).tolist()


def test_a_smallest_deviation() -> None:
    """Differences of 1e-4 are blown up to 1.2 by their own deviation; with min_std 0.1 they stay about a thousandth."""
    tiny = one_group(0.5, 0.5001)
    assert abs(grpo(*tiny)[0].item()) == pytest.approx(5e-5 / (1e-4 / math.sqrt(2) + 1e-4), rel=1e-4)
    assert abs(grpo(*tiny, min_std=0.1)[0].item()) == pytest.approx(5e-5 / 0.1001, rel=1e-4)
    assert abs(grpo(*tiny, min_std=0.1, std="batch")[0].item()) == pytest.approx(5e-5 / 0.1001, rel=1e-4)
    assert grpo(*one_group(1, 0, 0, 0), min_std=0.1).tolist() == grpo(*one_group(1, 0, 0, 0)).tolist()
    assert grpo_passk(*tiny, normalise_std=True, min_std=0.1)[1].item() == pytest.approx(1e-4 / 0.1001, rel=1e-4)
    assert gdpo(*parts([0.5, 0.5001]), tiny[1], min_std=0.1).abs().max().item() == pytest.approx(5e-5 / 0.1001, rel=1e-4)


def test_a_function_of_ones_own_is_taken_as_it_is() -> None:
    assert own(torch.tensor([1.5, -2.0])).tolist() == [1.5, -2.0]
    with pytest.raises(AssertionError, match="not finite"):
        own(torch.tensor([1.0, torch.nan]))


@pytest.mark.parametrize("name", sorted(name for name, row in ADVANTAGES.items() if row.level == "completion"))
def test_inputs_of_the_table(name: str) -> None:
    """Every row takes what it says it does; nothing scored gives nothing, and what is not a number is refused."""
    row = ADVANTAGES[name]

    def inputs(rewards: torch.Tensor) -> list[torch.Tensor]:
        count = rewards.numel()
        table = rewards[:, None]
        known = {
            "rewards": rewards, "greedy_rewards": torch.zeros(count), "own": rewards, "group": torch.zeros(count, dtype=torch.int64),
            "lengths": torch.ones(count, dtype=torch.int64), "scores": table, "weights": torch.ones_like(table),
            "present": torch.ones_like(table, dtype=torch.bool),
        }  # fmt: skip
        return [known[key] for key in row.inputs]

    assert row.function(*inputs(torch.zeros(0))).shape == (0,)
    held = torch.tensor([1.0, 0.5], requires_grad=True)
    assert not row.function(*inputs(held)).requires_grad
    with pytest.raises(AssertionError, match="not finite"):
        row.function(*inputs(torch.tensor([1.0, torch.nan])))
