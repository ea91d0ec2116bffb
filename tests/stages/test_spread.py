"""Completions that go to another rank before they pass through a model: nothing that is learned or told changes."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.protocols import Roles
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected
from rftcli.stages.credit import credit
from rftcli.stages.learn import learn, passing_of
from rftcli.stages.spread import cost, has_effect, spread
from rftcli.types import Group

RANKS = 3
LENGTHS = {0: (9, 9), 1: (1, 2), 2: (1, 1), 3: (8, 9, 7), 4: (2, 1), 5: (1, 3)}
"""Draw -> lengths of its answers; the long ones were sampled on rank 0."""
REWARDS = {0: (1.0, 0.0), 1: (0.0, 0.3), 2: (1.0, 1.0), 3: (0.0, 0.5, 1.0), 4: (1.0, 0.2), 5: (0.0, None)}
TABLE = [0.1 * number - 0.7 for number in range(16)]


def plan_of(made: SimpleNamespace, *sets: str) -> Any:
    return made.plan("rollout.max_new_tokens=10", "batch.prompts_per_step=6", "batch.tokens_per_micro_batch=24", *sets)


def groups(made: SimpleNamespace) -> list[Group]:
    return [
        Group(
            prompt=made.prompt(draw, ids=(1, 2)),
            samples=tuple(
                made.sample(draw, index, REWARDS[draw][index], ids=answer(draw + index, length), logprobs=(-0.5,) * length)
                for index, length in enumerate(lengths)
            ),
        )
        for draw, lengths in LENGTHS.items()
    ]


def answer(first: int, length: int) -> tuple[int, ...]:
    return tuple(3 + (first + token) % 9 for token in range(length))


def odd_groups(made: SimpleNamespace, seed: int) -> list[Group]:
    """Empty answers, tokens of tools, failed rewards, groups of one, groups without spread, and groups without any reward."""
    draws, found = random.Random(seed), []
    for draw in range(6):
        kind = draws.choice(("none", "same", "unlike", "unlike"))
        samples = []
        for index in range(draws.randint(1, 3)):
            ids = answer(draw + index, draws.choice((0, 1, 2, 9, 10)))
            mask = tuple(draws.random() < 0.5 for _ in ids) if draws.random() < 0.4 else None
            reward = None if kind == "none" or draws.random() < 0.1 else 1.0 if kind == "same" else draws.choice((0.0, 0.5, 1.0))
            samples.append(made.sample(draw, index, reward, ids=ids, mask=mask, logprobs=tuple(-2 * draws.random() for _ in ids)))
        found.append(Group(prompt=made.prompt(draw, ids=(1, 2)), samples=tuple(samples)))
    return found


def mine(made: SimpleNamespace, world: Any, updates: int = 1, seed: int | None = None) -> Collected:
    found = groups(made) if seed is None else odd_groups(made, seed)
    half = len(found) // updates
    parts = [found[start : start + half][world.rank :: world.size] for start in range(0, len(found), half)]
    return Collected(mini_batches=tuple(map(tuple, parts)), rollout_seconds=0.0, score_seconds=0.0)


def step(made: SimpleNamespace, plan: Any, world: Any, updates: int = 1, seed: int | None = None) -> dict[str, Any]:
    """Everything that a step leaves behind, and what this rank trained on."""
    learner = made.Table(world, TABLE)
    other = made.Table(world, [value * 0.5 for value in TABLE])
    roles = Roles(policy=learner, reference=other if plan.kl is not None else None)
    credited = credit(mine(made, world, updates, seed), roles, plan, world, pad_id=0, device=made.cpu)
    learner.seen.clear()
    done = learn(credited.mini_batches, learner, plan, world, pad_id=0, device=made.cpu, tick=lambda *_: None)
    load = dict(credited.metrics).pop("rank_load", None)
    return {
        "advantages": credited.advantages, "metrics": {name: value for name, value in credited.metrics.items() if name != "rank_load"},
        "kl": credited.kl_applied, "table": learner.table.detach(), "updates": [dict(update.metrics) for update in done],
        "load": load, "positions": sum(batch.input_ids.numel() for batch in learner.seen), "steps": len(learner.seen),
    }  # fmt: skip


CASES = {
    "on policy": ((), 1),
    "two updates": (("batch.updates_per_step=2", "batch.epochs=2"), 2),
    "kl in the loss": (("algorithm.kl.coefficient=0.3",), 1),
    "kl from answers": (("algorithm.kl={coefficient: 0.3, place: reward, level: sequence}",), 1),
    "kl from answers, mean": (("algorithm.kl={coefficient: 0.3, place: reward, level: mean}", "algorithm.advantage.kind=rloo"), 1),
    "kl from tokens": (("algorithm.kl={coefficient: 0.3, place: reward}", "algorithm.advantage.kind=reinforce_pp"), 1),
    "whitened with signal": (("algorithm.advantage={kind: reinforce_pp_baseline, whiten: with_signal}",), 1),
    "whitened with signal, moved before": (
        ("algorithm.advantage={kind: reinforce_pp_baseline, whiten: with_signal}", "algorithm.kl.coefficient=0.3"), 1,
    ),
    "whitened": (("algorithm.advantage={kind: rloo, whiten: all}",), 1),
    "corrected": (("algorithm.loss.correction={cap: 1.5}",), 1),
    "clipped": (("algorithm.advantage.clip=0.5",), 1),
    "shared prompts": (("batch.share_prompts=true",), 1),
    "passing all": (("batch.skip_zero_advantage=false",), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_any_rank_may_do_the_work(made: SimpleNamespace, name: str) -> None:
    sets, updates = CASES[name]
    alone = step(made, plan_of(made, *sets), SoloWorld(), updates)
    at_home = made.on_ranks(RANKS, lambda world: step(made, plan_of(made, *sets, "batch.balance=false"), world, updates))
    evened = made.on_ranks(RANKS, lambda world: step(made, plan_of(made, *sets), world, updates))
    assert alone["load"] is None and at_home[0]["load"] is None
    for found in (*at_home, *evened):
        assert list(found["advantages"]) == list(alone["advantages"])
        assert found["advantages"] == pytest.approx(alone["advantages"], rel=1e-6, abs=1e-7)
        assert found["table"].tolist() == pytest.approx(alone["table"].tolist(), rel=1e-6)
        assert found["kl"] == pytest.approx(alone["kl"])
        assert len(found["updates"]) == len(alone["updates"])
        for one, other in zip(found["updates"], alone["updates"], strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-9)
            assert one["entropy"] == 0.25  # of every token, so of those that passed
        assert found["metrics"].keys() == alone["metrics"].keys()
    load = evened[0]["load"]
    assert all(found["load"] == load for found in evened)
    assert 1 <= load["trained"] < load["sampled"] > 1.1
    assert max(found["positions"] for found in evened) < max(found["positions"] for found in at_home)
    assert len({found["steps"] for found in evened}) == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["two updates", "kl from answers", "corrected", "shared prompts", "whitened with signal"])
def test_odd_completions_change_nothing_either(made: SimpleNamespace, name: str, seed: int) -> None:
    sets, updates = CASES[name]
    plain = plan_of(made, *sets, "batch.balance=false", "batch.skip_zero_advantage=false")
    alone = step(made, plain, SoloWorld(), updates, seed)
    for ranks in (2, RANKS):
        for found in made.on_ranks(ranks, lambda world: step(made, plan_of(made, *sets), world, updates, seed)):
            assert found["advantages"] == pytest.approx(alone["advantages"], rel=1e-5, abs=1e-6)
            assert found["table"].tolist() == pytest.approx(alone["table"].tolist(), rel=1e-5, abs=1e-7)
            assert found["kl"] == pytest.approx(alone["kl"])
            for one, other in zip(found["updates"], alone["updates"], strict=True):
                told = {name: other[name] for name in ("loss", "policy_loss") if name in other}  # none of an update without a trained token
                assert {name: one[name] for name in told} == pytest.approx(told, rel=1e-5, abs=1e-7) and bool(one) == bool(other)


def rows_of(made: SimpleNamespace, world: Any, plan: Any) -> tuple[Any, ...]:
    credited = credit(mine(made, world), Roles(policy=None), plan, SoloWorld(), pad_id=0, device=made.cpu)
    return credited.mini_batches


def test_shared_prompts_keep_their_group_together(made: SimpleNamespace) -> None:
    plan = plan_of(made, "batch.share_prompts=true")

    def draws(world: Any) -> list[int]:
        ((experiences,), _) = spread(rows_of(made, world, plan), plan, world, only_with_effect=False)
        return [item.sample.completion.prompt.draw for item in experiences]

    found = made.on_ranks(RANKS, draws)
    assert sorted(draw for part in found for draw in part) == sorted([*range(6), *range(6), 3])
    assert not any(set(one) & set(other) for number, one in enumerate(found) for other in found[:number])
    assert {0, 3} - set(found[0]), "one of the two long groups left rank 0"


def test_what_has_no_effect_stays_and_counts_for_nothing(made: SimpleNamespace) -> None:
    """Draws 2 and 5 have no advantage: the ranks that sampled them are free for others' work."""
    plan = plan_of(made)

    def work(world: Any) -> tuple[list[tuple[int, int]], float]:
        rows = rows_of(made, world, plan)
        for item in rows[0]:
            item.advantages = torch.full_like(item.advantages, 0.0 if item.sample.completion.prompt.draw in (2, 5) else 1.0)
        ((experiences,), load) = spread(rows, plan, world, only_with_effect=True)
        idle = [(world.rank, item.sample.completion.prompt.draw) for item in experiences if not has_effect(item, plan.batch)]
        return idle, load["trained"]

    found = made.on_ranks(RANKS, work)
    assert [idle for idle, _ in found] == [[], [], [(2, 2), (2, 2), (2, 5), (2, 5)]]
    assert found[0][1] < 1.2


def test_a_step_without_any_advantage_is_measured_all_the_same(made: SimpleNamespace) -> None:
    plan = plan_of(made)
    (rows,) = rows_of(made, SoloWorld(), plan)
    for item in rows:
        item.advantages = torch.zeros_like(item.advantages)
    passing, tokens, idle = passing_of(rows, plan, SoloWorld())
    assert (list(passing), idle) == (list(rows), 0.0) and tokens == sum(int(item.mask.sum()) for item in rows)


def test_a_step_without_any_advantage_is_shared_out_too(made: SimpleNamespace) -> None:
    """Everything passes then, so everything is work."""
    plan = plan_of(made)

    def work(world: Any) -> tuple[int, float]:
        rows = rows_of(made, world, plan)
        for item in rows[0]:
            item.advantages = torch.zeros_like(item.advantages)
        ((experiences,), load) = spread(rows, plan, world, only_with_effect=True)
        return sum(len(item.token_ids) for item in passing_of(experiences, plan, world)[0]), load["trained"]

    found = made.on_ranks(RANKS, work)
    positions = [positions for positions, _ in found]
    assert found[0][1] == pytest.approx(max(positions) * RANKS / sum(positions)) and max(positions) - min(positions) <= 3


def test_a_rank_without_work_takes_part(made: SimpleNamespace) -> None:
    plan = plan_of(made, "batch.balance=false")

    def work(world: Any) -> tuple[int, list[int], int, float]:
        (rows,) = rows_of(made, world, plan)
        for item in rows:
            item.advantages = torch.full_like(item.advantages, float(world.rank == 1))
        passing, tokens, idle = passing_of(rows, plan, world)
        return len(passing), [int(item.mask.sum()) for item in passing], tokens, idle

    found = made.on_ranks(RANKS, work)
    assert found[0][:2] == found[2][:2] == (1, [0])  # a filler, in which nothing is trained
    assert found[1][0] == 4 and {tokens for _, _, tokens, _ in found} == {sum(found[1][1])}
    assert len({idle for *_, idle in found}) == 1 and 0 < found[0][3] < 1


def test_only_numbers_travel(made: SimpleNamespace) -> None:
    """What data and rewards attached to a completion may be large, or of a kind that cannot travel."""
    plan, stays = plan_of(made, "algorithm.kl.coefficient=0.3"), (item for item in ())  # a generator cannot be pickled

    def work(world: Any) -> list[tuple[bool, bool]]:
        def odd(sample: Any) -> Any:
            prompt = replace(sample.completion.prompt, columns={"odd": stays}, reference=stays)
            return replace(sample, completion=replace(sample.completion, prompt=prompt), extra={"odd": stays})

        collected = mine(made, world)
        parts = [[replace(group, samples=tuple(map(odd, group.samples))) for group in part] for part in collected.mini_batches]
        collected = replace(collected, mini_batches=tuple(map(tuple, parts)))
        other = made.Table(world, TABLE)
        credited = credit(collected, Roles(policy=other, reference=other), plan, world, pad_id=0, device=made.cpu)
        home = {group.prompt.draw for group in collected.groups}
        return [(item.sample.completion.prompt.draw in home, "odd" in item.sample.extra) for item in credited.mini_batches[0]]

    found = [told for part in made.on_ranks(RANKS, work) for told in part]
    assert len(found) == 13 and {True, False} == {home for home, _ in found}
    assert all(home == odd for home, odd in found)


def test_the_work_of_a_completion(made: SimpleNamespace) -> None:
    plan = plan_of(made).batch
    (rows,) = rows_of(made, SoloWorld(), plan_of(made))
    first, second = rows[:2]
    assert (len(first.token_ids), len(second.token_ids)) == (11, 11)
    assert cost([first], plan) == 11 and cost([first, second], plan) == 22
    assert cost([first, second], replace(plan, share_prompts=True, layout="packed")) == 20
    assert cost([first, second], replace(plan, attention_cost=0.1)) == pytest.approx(22 + 0.1 * 242)
    assert cost([], plan) == 0


def test_with_a_critic_every_completion_is_work(made: SimpleNamespace) -> None:
    """It learns from those without advantage as well."""
    plan = plan_of(made, "algorithm.advantage={kind: gae, whiten: 'off'}", "models.critic={}")
    critic = SimpleNamespace(values=lambda batch: torch.zeros(len(batch.target_ids)))

    def work(world: Any) -> tuple[int, int, float]:
        credited = credit(mine(made, world), Roles(policy=None, critic=critic), plan, world, pad_id=0, device=made.cpu)
        rows = [item for part in credited.mini_batches for item in part]
        without = sum(not has_effect(item, plan.batch) for item in rows)
        return sum(len(item.token_ids) for item in rows), without, credited.metrics["rank_load"]["trained"]

    found = made.on_ranks(RANKS, work)
    positions = [positions for positions, _, _ in found]
    assert sum(without for _, without, _ in found) > 3
    assert found[0][2] == pytest.approx(max(positions) * RANKS / sum(positions)) and max(positions) - min(positions) <= 3


def test_a_critics_passes_are_cut_in_order_of_length(made: SimpleNamespace) -> None:
    """Padded rows of 11, 3, 11 and 3 positions within 24: 22 + 6, and not twice 22; values come back to their completions."""
    plan = plan_of(made, "algorithm.advantage={kind: gae, whiten: 'off'}", "models.critic={}")
    seen: list[int] = []

    def values(batch: Any) -> torch.Tensor:
        seen.append(batch.input_ids.numel())
        return batch.target_ids.double()

    samples = tuple(made.sample(0, index, 1.0, ids=answer(index, length)) for index, length in enumerate((9, 1, 9, 1)))
    group = Group(prompt=made.prompt(0), samples=samples)
    collected = Collected(mini_batches=((group,),), rollout_seconds=0.0, score_seconds=0.0)
    roles = Roles(policy=None, critic=SimpleNamespace(values=values))
    ((*rows,),) = credit(collected, roles, plan, SoloWorld(), pad_id=0, device=made.cpu).mini_batches
    assert sorted(seen) == [6, 22]
    for item in rows:
        assert item.values.tolist() == item.token_ids[item.prompt_tokens :].tolist()
