"""Credit per token over a step: the KL in the reward, gae with a critic, whitening, clipping; the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.protocols import Roles
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import Collected
from rftcli.stages.credit import Credited, credit, step_advantages
from rftcli.types import Batch, Experience, Group

GAE = ("algorithm.advantage.kind=gae", "models.critic={}")


class Worth:
    """A critic: the value before a token is a number of its own."""

    def __init__(self, values: Sequence[float]) -> None:
        self.table = torch.tensor(values)

    def values(self, batch: Batch) -> torch.Tensor:
        return self.table[batch.target_ids]


def run(
    made: SimpleNamespace, groups: Sequence[Group], *sets: str, size: int = 1, values: Sequence[float] = (0.0,) * 10, **arguments: Any
) -> list[Credited]:
    """Credit on each of `size` ranks; the policy's log-prob of token t is -t/10, the reference's -t/5 where the recipe has a KL term."""
    plan = made.plan("batch.micro_batch_size=2", "rollout.max_new_tokens=6", *sets)

    def work(world: Any) -> Credited:
        policy = made.Table(world, [-0.1 * token for token in range(10)])
        reference = None if plan.reference is None else made.Table(world, [-0.2 * token for token in range(10)])
        roles = Roles(policy=policy, reference=reference, critic=None if plan.critic is None else Worth(values))
        mine = [groups] if world.size == 1 else [groups[:1], groups[1:]]
        collected = Collected(mini_batches=(tuple(mine[world.rank]),), rollout_seconds=0.0, score_seconds=0.0)
        return credit(collected, roles, plan, world, pad_id=0, device=made.cpu, **arguments)

    return [work(SoloWorld())] if size == 1 else made.on_ranks(size, work)


def everything(credited: Sequence[Credited]) -> list[Experience]:
    return [item for part in credited for mini_batch in part.mini_batches for item in mini_batch]


def one(made: SimpleNamespace, *samples: Any, draw: int = 0) -> Group:
    return Group(prompt=made.prompt(draw), samples=samples)


def test_gae_with_a_tool_span_in_numbers(made: SimpleNamespace) -> None:
    """Values .5, .6, .7 before the trained tokens, any value within the tool's output, reward 1 at the last trained token: 0.46575, 0.385, 0.3."""
    ids, mask = (1, 2, 9, 9, 3, 8), (True, True, False, False, True, False)
    group = one(made, made.sample(0, 0, 1.0, ids=ids, mask=mask))
    values = [0.0, 0.5, 0.6, 0.7, 0, 0, 0, 0, 55.0, 77.0]
    sets = (*GAE, "algorithm.advantage={lam: 0.95, whiten: 'off'}", "rollout.samples_per_prompt=1")
    (found,) = run(made, [group], *sets, values=values)
    (item,) = everything([found])
    assert item.advantages.tolist() == pytest.approx([0.46575, 0.385, 0, 0, 0.3, 0])
    assert item.values is not None and item.values.tolist() == pytest.approx([0.5, 0.6, 0, 0, 0.7, 0])
    assert item.returns is not None and item.returns.tolist() == pytest.approx([0.96575, 0.985, 0, 0, 1.0, 0])
    assert found.metrics == {"value_mean": pytest.approx(0.6), "return_mean": pytest.approx((0.96575 + 0.985 + 1.0) / 3)}
    assert found.advantages == {(0, 0): pytest.approx((0.46575 + 0.385 + 0.3) / 3)}


@pytest.mark.parametrize("size", [1, 2])
def test_gae_is_whitened_over_the_tokens_of_all_ranks(made: SimpleNamespace, size: int) -> None:
    """With values of 0 and lambda 1 every token of an answer has its reward: 1 for ten tokens would outweigh; mean 0 and variance 1 over tokens."""
    groups = [
        one(made, made.sample(0, 0, 1.0, ids=(1, 2, 3)), made.sample(0, 1, None, ids=(4, 5))),
        one(made, made.sample(1, 0, 0.0, ids=(6,)), made.sample(1, 1, 3.0, ids=()), draw=1),
    ]
    credited = run(made, groups, *GAE, size=size)
    trained = torch.cat([item.advantages[item.mask] for item in everything(credited)])
    assert trained.tolist() == pytest.approx([0.57735, 0.57735, 0.57735, -1.73205], abs=1e-4)
    for found in credited:
        assert found.advantages == {(0, 0): pytest.approx(0.57735, abs=1e-4), (1, 0): pytest.approx(-1.73205, abs=1e-4)}
        assert found.metrics["return_mean"] == pytest.approx(0.75) and found.metrics["value_mean"] == 0.0
    unscored = next(item for item in everything(credited) if item.sample.reward is None)
    assert unscored.advantages.tolist() == [0.0, 0.0] and not unscored.mask.any()


@pytest.mark.parametrize(("level", "taken"), [("sequence", (0.3, 0.7)), ("mean", (0.15, 0.35))])
@pytest.mark.parametrize("size", [1, 2])
def test_kl_in_the_reward_of_an_answer(made: SimpleNamespace, level: str, taken: tuple[float, float], size: int) -> None:
    """d = token/10 for each token; (1, 2) has the sum .3, (3, 4) .7, times the coefficient, before the baseline of rloo."""
    groups = [one(made, made.sample(draw, 0, 1.0, ids=(1, 2)), made.sample(draw, 1, 0.0, ids=(3, 4)), draw=draw) for draw in range(2)]
    kl = f"algorithm.kl={{coefficient: 1.0, estimator: k1, place: reward, level: {level}}}"
    credited = run(made, groups, "algorithm.advantage.kind=rloo", kl, size=size, kl_coefficient=2.0)
    first, second = 1.0 - 2 * taken[0], 0.0 - 2 * taken[1]
    for found in credited:
        assert [found.advantages[0, 0], found.advantages[0, 1]] == pytest.approx([first - second, second - first], abs=1e-6)
        assert found.kl_applied == pytest.approx(0.5 if level == "sequence" else 0.25)
        assert found.metrics["kl"] == pytest.approx(0.25)


def test_kl_in_the_reward_of_each_token(made: SimpleNamespace) -> None:
    """Return to go of -0.1 x d, d = token/10, and the reward at the last trained token."""
    group = one(made, made.sample(0, 0, 1.0, ids=(1, 2, 3)))
    kl = "algorithm.kl={coefficient: 0.1, estimator: k1, place: reward}"
    (found,) = run(made, [group], "algorithm.advantage.kind=reinforce", kl, "rollout.samples_per_prompt=1")
    (item,) = everything([found])
    assert item.advantages.tolist() == pytest.approx([1 - 0.01 - 0.02 - 0.03, 1 - 0.02 - 0.03, 1 - 0.03], abs=1e-6)
    assert item.returns is None and found.metrics == {"kl": pytest.approx(0.2)}


def test_a_discount_alone_makes_reinforce_count_tokens(made: SimpleNamespace) -> None:
    group = one(made, made.sample(0, 0, 1.0, ids=(1, 2, 3)))
    (found,) = run(made, [group], "algorithm.advantage={kind: reinforce, gamma: 0.5}", "rollout.samples_per_prompt=1")
    assert everything([found])[0].advantages.tolist() == pytest.approx([0.25, 0.5, 1.0])


def test_whitening_of_answers_is_asked_for(made: SimpleNamespace) -> None:
    """Two groups 1, 0, 0, 0 and 1, 1, 1, 1 with rloo: 2.290763 only with `all`; defaults leave the estimator as it is."""
    groups = made.groups({0: [1.0, 0.0, 0.0, 0.0], 1: [1.0] * 4})
    plain = step_advantages(groups, made.plan("algorithm.advantage.kind=rloo").advantage, SoloWorld())
    assert plain[0, 0] == pytest.approx(1.0) and plain[1, 0] == 0.0
    white = made.plan("algorithm.advantage={kind: rloo, whiten: all}").advantage
    for found in (step_advantages(groups, white, SoloWorld()), *made.on_ranks(2, lambda world: step_advantages([groups[world.rank]], white, world))):
        assert [found[0, index] for index in range(4)] == pytest.approx([2.290763, *[-0.763588] * 3], abs=1e-5)
        assert [found[1, index] for index in range(4)] == pytest.approx([0.0] * 4, abs=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce"])
def test_defaults_change_no_estimator(made: SimpleNamespace, kind: str) -> None:
    groups = made.groups({0: [1.0, 0.25], 1: [0.5, 0.0]})
    default, off = (made.plan(f"algorithm.advantage={{kind: {kind}{more}}}").advantage for more in ("", ", whiten: 'off'"))
    assert step_advantages(groups, default, SoloWorld()) == step_advantages(groups, off, SoloWorld())


@pytest.mark.parametrize("size", [1, 2])
def test_advantages_are_clipped_after_whitening_and_counted(made: SimpleNamespace, size: int) -> None:
    groups = made.groups({0: [1.0, 0.0, 0.0, 0.0], 1: [1.0] * 4})
    sets = ("algorithm.advantage={kind: rloo, whiten: all, clip: 1.5}", "rollout.samples_per_prompt=4", "batch.prompts_per_step=2")
    credited = run(made, groups, *sets, size=size)
    for found in credited:
        assert found.advantages[0, 0] == 1.5 and found.advantages[0, 1] == pytest.approx(-0.763588, abs=1e-5)
        assert found.metrics["advantage_clip_fraction"] == pytest.approx(1 / 8)
    assert float(everything(credited)[0].advantages.max()) == 1.5
