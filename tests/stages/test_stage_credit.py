"""From scored groups to experiences: advantages over all ranks, log-probs where the plan asks for them, masks where a reward is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.plan.plan import AdvantagePlan
from rftcli.protocols import Roles
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected
from rftcli.stages.credit import credit, step_advantages
from rftcli.types import Group

GRPO = AdvantagePlan(kind="grpo", options={"normalise_std": True, "std": "group"})
RLOO = AdvantagePlan(kind="rloo", options={})


def collected(*mini_batches: Sequence[Group]) -> Collected:
    return Collected(mini_batches=tuple(map(tuple, mini_batches)), rollout_seconds=0.0, score_seconds=0.0)


def values(made: SimpleNamespace, rewards: Mapping[int, Sequence[float | None]], plan: AdvantagePlan) -> dict[tuple[int, int], float]:
    return step_advantages(made.groups(rewards), plan, SoloWorld())


def test_only_scored_siblings_count(made: SimpleNamespace) -> None:
    """1, None, 0, None: the two without a score move no baseline."""
    rewards = {0: [1.0, None, 0.0, None], 1: [0.7, None, None, None], 2: [None] * 4}
    s = 0.5**0.5
    assert values(made, rewards, GRPO) == {
        (0, 0): pytest.approx(0.5 / (s + 1e-4)), (0, 2): pytest.approx(-0.5 / (s + 1e-4)), (1, 0): 0.0,
    }  # fmt: skip
    assert values(made, rewards, RLOO) == {(0, 0): 1.0, (0, 2): -1.0, (1, 0): 0.0}
    assert values(made, {0: [None, None]}, GRPO) == {}


def test_a_prompt_drawn_twice_is_two_groups(made: SimpleNamespace) -> None:
    found = values(made, {0: [1.0] * 4, 1: [0.0] * 4}, RLOO)
    assert len(found) == 8 and set(found.values()) == {0.0}


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce"])
def test_any_number_of_ranks_gives_the_same_bits(made: SimpleNamespace, kind: str) -> None:
    plan = made.plan(f"algorithm.advantage.kind={kind}", *(["algorithm.advantage.std=batch"] if kind == "grpo" else [])).advantage
    groups = made.groups({draw: [0.1 * draw, 0.3, None if draw == 2 else 1.0 / (draw + 3)] for draw in range(6)})
    solo = step_advantages(groups, plan, SoloWorld())
    for size in (2, 3):
        for found in made.on_ranks(size, lambda world: step_advantages(groups[world.rank :: world.size][::-1], plan, world)):
            assert found == solo and list(found) == sorted(found)


def test_an_experience(made: SimpleNamespace) -> None:
    group = Group(
        prompt=made.prompt(0),
        samples=(
            made.sample(0, 0, 1.0, ids=(5, 6, 7), mask=(True, False, True), logprobs=(-0.1, -0.2, -0.3)),
            made.sample(0, 1, 0.0, ids=(8,)),
            made.sample(0, 2, None, ids=(9, 9)),
            made.sample(0, 3, 0.5, ids=()),
        ),
    )
    found = credit(collected([group]), Roles(policy=None), made.plan("algorithm.advantage.kind=rloo"), SoloWorld(), pad_id=0, device=made.cpu)
    first, second, third, fourth = found.mini_batches[0]
    assert first.token_ids.tolist() == [1, 2, 5, 6, 7] and first.prompt_tokens == 2 and first.token_ids.dtype == torch.int64
    assert first.mask.tolist() == [True, False, True]
    assert first.advantages.tolist() == [0.75] * 3 and first.advantages.dtype == torch.float32
    assert first.sampler_logprobs is not None and first.sampler_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert first.old_logprobs is None and first.reference_logprobs is None and first.sample is group.samples[0]
    assert second.advantages.tolist() == [-0.75] and second.mask.tolist() == [True] and second.sampler_logprobs is None
    assert third.mask.tolist() == [False, False] and third.advantages.tolist() == [0.0, 0.0]
    assert fourth.mask.numel() == 0 and fourth.token_ids.tolist() == [1, 2]
    assert found.advantages == {(0, 0): 0.75, (0, 1): -0.75, (0, 3): 0.0}


def log_probs(made: SimpleNamespace, *sets: str, size: int = 1) -> list[Any]:
    """Experiences of a step whose policy says -token/10 and whose reference says -token/100, on each of `size` ranks."""
    plan = made.plan("batch.micro_batch_size=2", *sets)
    groups = [
        Group(
            prompt=made.prompt(draw),
            samples=tuple(made.sample(draw, index, 1.0 - index, ids=tuple(range(3, 4 + index + draw))) for index in range(2)),
        )
        for draw in range(3)
    ]

    def work(world: Any) -> Any:
        policy = made.Table(world, [-0.1 * token for token in range(10)])
        reference = made.Table(world, [-0.01 * token for token in range(10)])
        mine = groups if world.size == 1 else [groups[:2], groups[2:]][world.rank]
        roles = Roles(policy=policy, reference=reference if "algorithm.kl.coefficient=0.1" in sets else None)
        found = credit(collected(mine[:1], mine[1:]), roles, plan, world, pad_id=0, device=made.cpu)
        items = [item for mini_batch in found.mini_batches for item in mini_batch]
        return items, len(policy.seen), len(reference.seen), policy.table.grad, reference.naps

    return [work(SoloWorld())] if size == 1 else made.on_ranks(size, work)


def test_no_pass_without_a_need(made: SimpleNamespace) -> None:
    ((experiences, passes, reference_passes, _, naps),) = log_probs(made)
    assert passes == reference_passes == naps == 0
    assert all(item.old_logprobs is None and item.reference_logprobs is None for item in experiences)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_log_probs_land_at_their_own_tokens(made: SimpleNamespace, layout: str) -> None:
    sets = ("batch.epochs=2", "algorithm.kl.coefficient=0.1", f"batch.layout={layout}")
    ((experiences, passes, reference_passes, gradient, naps),) = log_probs(made, *sets)
    assert naps == 1  # it may leave the device once all passes are done
    assert passes == reference_passes == 3 and gradient is None  # six rows, two at a time, without gradient
    for item in experiences:
        tokens = item.token_ids[item.prompt_tokens :].double()
        assert item.old_logprobs.tolist() == pytest.approx((-0.1 * tokens).tolist())
        assert item.reference_logprobs.tolist() == pytest.approx((-0.01 * tokens).tolist())


def test_every_rank_makes_as_many_passes(made: SimpleNamespace) -> None:
    """Four rows on one rank, two on the other: under ZeRO-3 a pass that one rank leaves out would hang the rest."""
    ranks = log_probs(made, "batch.epochs=2", size=2)
    assert [len(experiences) for experiences, *_ in ranks] == [4, 2]
    assert [passes for _, passes, *_ in ranks] == [2, 2]
    for experiences, *_ in ranks:
        for item in experiences:
            assert item.old_logprobs.tolist() == pytest.approx((-0.1 * item.token_ids[item.prompt_tokens :].double()).tolist())


def read(made: SimpleNamespace, rewards: Mapping[int, Sequence[float]], *sets: str, size: int = 1, cut: int = 2) -> list[tuple[dict[int, bool], int]]:
    """(whether the completions of a draw have log-probs at rollout time, passes) of each rank; draws below `cut` are one mini-batch."""
    plan = made.plan("batch.micro_batch_size=2", "batch.balance=false", *sets)

    def work(world: Any) -> tuple[dict[int, bool], int]:
        policy, mine = made.Table(world, [-0.1 * token for token in range(10)]), made.groups(rewards)[world.rank :: world.size]
        parts = [[group for group in mine if (group.prompt.draw < cut) is first] for first in (True, False)]
        found = credit(collected(*filter(None, parts)), Roles(policy=policy), plan, world, pad_id=0, device=made.cpu)
        items = [item for mini_batch in found.mini_batches for item in mini_batch]
        return {item.sample.completion.prompt.draw: item.old_logprobs is not None for item in items}, len(policy.seen)

    return [work(SoloWorld())] if size == 1 else made.on_ranks(size, work)


GRADED, EVEN = (1.0, 0.0), (1.0, 1.0)


def test_what_the_update_leaves_out_is_not_read_before_it(made: SimpleNamespace) -> None:
    assert read(made, {0: GRADED, 1: EVEN}, "batch.epochs=2") == [({0: True, 1: False}, 1)]
    assert read(made, {0: EVEN, 1: EVEN, 2: GRADED, 3: EVEN}, "batch.epochs=2") == [({0: True, 1: True, 2: True, 3: False}, 3)]  # all of one pass
    assert read(made, {0: EVEN, 1: GRADED, 2: EVEN, 3: GRADED}, "batch.epochs=2", size=2) == [({0: False, 2: False}, 2), ({1: True, 3: True}, 2)]


@pytest.mark.parametrize(
    "sets",
    [
        ("batch.skip_zero_advantage=false",),
        ("algorithm.loss.top_entropy_share=0.5",),
        ("algorithm.loss.correction={}",),
        ("algorithm.loss.kind=kl_cov",),
    ],
)
def test_all_are_read_where_something_else_reads_them(made: SimpleNamespace, sets: tuple[str, ...]) -> None:
    assert read(made, {0: GRADED, 1: EVEN}, "batch.epochs=2", *sets) == [({0: True, 1: True}, 2)]


def test_a_masked_token_has_no_old_log_prob(made: SimpleNamespace) -> None:
    group = Group(prompt=made.prompt(0), samples=(made.sample(0, 0, 1.0, ids=(5, 6), mask=(False, True)), made.sample(0, 1, None, ids=(7,))))
    policy = made.Table(SoloWorld(), [-0.1 * token for token in range(10)])
    found = credit(collected([group]), Roles(policy=policy), made.plan("batch.epochs=2"), SoloWorld(), pad_id=0, device=made.cpu)
    first, second = found.mini_batches[0]
    assert first.old_logprobs is not None and first.old_logprobs.tolist() == pytest.approx([0.0, -0.6])
    assert second.old_logprobs is not None and second.old_logprobs.tolist() == [0.0]
