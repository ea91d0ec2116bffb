"""Advantage estimators against closed forms, and the properties they share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftcli.algo.advantages import ADVANTAGES
from rftcli.algo.answer_advantages import reinforce
from rftcli.algo.group_advantages import grpo, rloo
from rftcli.algo.groups import groups_with_spread, zero_signal_fraction

VARIANTS = {
    "grpo": grpo,
    "grpo batch": lambda rewards, group: grpo(rewards, group, std="batch"),
    "dr grpo": lambda rewards, group: grpo(rewards, group, normalise_std=False),
    "rloo": rloo,
}


def of_groups(function, *groups: list[float], **options) -> list[list[float]]:
    """The advantages of some groups of scored rewards, group by group. Groups get ids that are neither sorted nor dense."""
    ids = [(7 * index + 5) % 101 for index in range(len(groups))]
    group = torch.tensor([name for name, rewards in zip(ids, groups, strict=True) for _ in rewards], dtype=torch.int64)
    flat = function(torch.tensor([reward for rewards in groups for reward in rewards]), group, **options)
    assert flat.dtype == torch.float32 and not flat.requires_grad
    return [part.tolist() for part in flat.split([len(rewards) for rewards in groups])]


def close(values: list[float]):
    return pytest.approx(values, abs=5e-7)


def test_rloo_numbers() -> None:
    assert of_groups(rloo, [1, 0, 0, 1]) == [close([2 / 3, -2 / 3, -2 / 3, 2 / 3])]
    assert of_groups(rloo, [1, 0, 1]) == [close([0.5, -1, 0.5])]  # 1, None, 0, 1


def test_grpo_numbers() -> None:
    assert of_groups(grpo, [1, 0, 0, 0]) == [close([1.499700] + [-0.499900] * 3)]
    assert of_groups(grpo, [1, 0, 0, 0], eps=0.0) == [close([1.5] + [-0.5] * 3)]
    assert of_groups(grpo, [1, 0]) == [pytest.approx([0.707, -0.707], abs=5e-4)]  # 1, None, 0, None
    assert of_groups(grpo, [1, 0], eps=0.0) == [close([0.707107, -0.707107])]
    assert of_groups(grpo, [1, 0, 0, 0], [1, 1, 1, 0], std="batch") == [
        close([1.402859] + [-0.467620] * 3),
        close([0.467620] * 3 + [-1.402859]),
    ]
    assert of_groups(grpo, [1, 0, 0, 0], normalise_std=False) == [close([0.75] + [-0.25] * 3)]


def test_reinforce_is_the_reward() -> None:
    advantages = reinforce(torch.tensor([1.0, -0.5, 0.1], requires_grad=True))
    assert advantages.tolist() == torch.tensor([1.0, -0.5, 0.1]).tolist() and not advantages.requires_grad


def test_the_same_prompt_twice_is_two_groups() -> None:
    for function in VARIANTS.values():
        assert of_groups(function, [1] * 4, [0] * 4) == [[0.0] * 4, [0.0] * 4]
    assert of_groups(rloo, [1, 1, 1, 1, 0, 0, 0, 0]) == [close([0.571429] * 4 + [-0.571429] * 4)]  # what merging them would give
    assert of_groups(grpo, [1, 1, 1, 1, 0, 0, 0, 0], eps=0.0) == [close([0.935414] * 4 + [-0.935414] * 4)]


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_unscored_completions_move_no_baseline(name: str) -> None:
    with_absent = of_groups(VARIANTS[name], [1, 0], [0.7], [], [1, 0, 0, 1])
    assert with_absent[1:3] == [[0.0], []]
    assert with_absent[0] == [-with_absent[0][1], with_absent[0][1]]
    assert of_groups(rloo, [1, 0]) == [[1.0, -1.0]]


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 / 3, -0.7, 0.0])
def test_groups_without_spread_are_exactly_zero(name: str, reward: float) -> None:
    assert of_groups(VARIANTS[name], [reward] * 8) == [[0.0] * 8]
    assert of_groups(VARIANTS[name], [reward, reward * (1 + 2e-7)] * 4) == [[0.0] * 8]
    assert of_groups(VARIANTS[name], [reward]) == [[0.0]]
    assert of_groups(VARIANTS[name]) == []


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_small_spread_counts(name: str) -> None:
    """From 1e-6 on, relative to the larger of 1 and the largest reward."""
    for rewards in ([0.0, 2e-6], [1e6, 1e6 + 2], [-1e6 - 2, -1e6]):
        (advantages,) = of_groups(VARIANTS[name], rewards)
        assert advantages[0] < 0 < advantages[1]
    for rewards in ([0.0, 5e-7], [1e6, 1e6 + 0.5], [-1e6 - 0.5, -1e6]):
        assert of_groups(VARIANTS[name], rewards) == [[0.0, 0.0]]


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_group_order_and_names_do_not_matter(name: str) -> None:
    rewards = torch.tensor([1.0, 0.2, 0.5, 0.5, 0.0, 0.9])
    group = torch.tensor([3, 3, 3, 8, 8, 8])
    shuffle = torch.tensor([4, 0, 5, 2, 1, 3])
    sorted_groups = VARIANTS[name](rewards, group)
    assert torch.allclose(VARIANTS[name](rewards[shuffle], group[shuffle]), sorted_groups[shuffle])
    assert torch.equal(VARIANTS[name](rewards, 10 - group), sorted_groups)


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards of a step, in thousandths so that every spread is either 0 or plain, and their groups."""
    rewards = draw(st.lists(st.integers(-3000, 3000), min_size=1, max_size=24))
    group = draw(st.lists(st.integers(-2, 4), min_size=len(rewards), max_size=len(rewards)))
    return torch.tensor(rewards, dtype=torch.float64) / 1000, torch.tensor(group)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@given(step=steps(), shift=st.integers(-5, 5))
def test_shifting_all_rewards_changes_nothing(name: str, step: tuple, shift: int) -> None:
    rewards, group = step
    assert torch.allclose(VARIANTS[name](rewards + shift, group), VARIANTS[name](rewards, group), atol=1e-5)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@given(step=steps())
def test_advantages_of_a_group_sum_to_zero(name: str, step: tuple) -> None:
    rewards, group = step
    advantages = VARIANTS[name](rewards, group)
    for member in group.unique():
        assert advantages[group == member].double().sum().item() == pytest.approx(0.0, abs=1e-4)


@given(steps(), st.sampled_from([0.5, 2.0, 100.0]))
def test_scaling_the_rewards(step: tuple, scale: float) -> None:
    rewards, group = step
    assert torch.allclose(rloo(rewards * scale, group), rloo(rewards, group) * scale, rtol=1e-5)
    assert torch.allclose(reinforce(rewards * scale), reinforce(rewards) * scale)
    for std in ("group", "batch"):
        scaled = grpo(rewards * scale, group, std=std, eps=1e-4 * scale)  # with the epsilon scaled along, the scale cancels
        assert torch.allclose(scaled, grpo(rewards, group, std=std), rtol=1e-4, atol=1e-6)


@given(steps())
def test_rloo_is_the_mean_of_the_others(step: tuple) -> None:
    rewards, group = step
    advantages = rloo(rewards, group)
    for index in range(len(rewards)):
        others = rewards[(group == group[index]) & (torch.arange(len(rewards)) != index)]
        expected = rewards[index] - others.mean() if len(others) else torch.tensor(0.0)
        assert advantages[index].item() == pytest.approx(expected.item(), abs=1e-6)


def test_groups_with_spread_and_zero_signal() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.1, 0.1, 0.1, 0.5, 0.0, 0.4])
    group = torch.tensor([40, 40, 7, 7, 7, 9, 2, 2])
    assert groups_with_spread(rewards, group).tolist() == [2, 40]
    assert zero_signal_fraction(rewards, group, 5) == pytest.approx(0.6)  # flat, single, and one of which nothing was scored
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert groups_with_spread(*nothing).tolist() == []
    assert zero_signal_fraction(*nothing, 3) == 1.0


def test_the_table() -> None:
    groups = {"grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "grpo_passk", "gdpo", "cpgd"}
    assert {name for name, row in ADVANTAGES.items() if row.baseline} == groups == {name for name, row in ADVANTAGES.items() if row.min_samples == 2}
    assert {name for name, row in ADVANTAGES.items() if row.level == "token"} == {"gae", "reinforce_pp", "distill"}
    assert {name: row.whiten for name, row in ADVANTAGES.items() if row.whiten} == {
        "gae": "tokens", "reinforce_pp": "tokens", "reinforce_pp_baseline": "tokens", "gdpo": "completions",
    }  # fmt: skip
    assert {name: row.loss for name, row in ADVANTAGES.items() if row.loss} == {"cpgd": "cpg", "gpg": "reinforce"}
