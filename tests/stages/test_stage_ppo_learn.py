"""Updates with a critic and a supervised stream beside the policy: who learns when, with which denominators, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcli.data.spec import DataSpec
from rftcli.errors import ResumeError
from rftcli.plan.plan import SupervisedPlan
from rftcli.runtime.kl_control import KlControl
from rftcli.runtime.world import SoloWorld
from rftcli.stages.beside import Beside
from rftcli.stages.learn import learn
from rftcli.stages.supervised import SupervisedStream
from rftcli.types import Experience

GAE = ("algorithm.advantage.kind=gae", "models.critic={}")
ROWS = [((1, 2, 3, 4), 2), ((1, 5, 6), 1), ((2, 7), 1), ((3, 8, 8, 8, 9), 1), ((1, 4), 1)]


def stream(rows_per_update: int = 2, seed: int = 0, rows: Any = ROWS, coefficient: float = 0.5) -> SupervisedStream:
    plan = SupervisedPlan(data=DataSpec(name="s", path="p"), coefficient=coefficient, rows_per_update=rows_per_update, max_answer_tokens=9)
    return SupervisedStream(rows, plan, seed)


def experience(ids: tuple[int, ...], advantage: float = 1.0) -> Experience:
    length = len(ids)
    return Experience(
        sample=None,
        token_ids=torch.tensor((1, 2, *ids)),
        prompt_tokens=2,
        mask=torch.ones(length, dtype=torch.bool),
        advantages=torch.full((length,), advantage),
        values=torch.zeros(length),
        returns=torch.ones(length),
    )


class Recorder:
    """Notes who steps, and at which temperature a batch was asked for."""

    def __init__(self, inner: Any, name: str, log: list[str]) -> None:
        self.inner, self.name, self.log = inner, name, log
        self.temperatures: list[float | None] = []

    @property
    def version(self) -> int:
        return int(self.inner.version)

    @property
    def lr(self) -> float:
        return float(self.inner.lr)

    def backward(self, batch: Any, loss: Any, last: bool, temperature: float | None = None) -> Any:
        self.temperatures.append(temperature)
        return self.inner.backward(batch, loss, last)

    def step(self) -> Any:
        self.log.append(self.name)
        return self.inner.step()


def steps(made: SimpleNamespace, world: Any, *sets: str, **beside: Any) -> Any:
    log: list[str] = []
    policy = Recorder(made.Table(world, [0.0] * 10), "policy", log)
    critic = Recorder(made.Table(world, [0.0] * 10), "critic", log)
    plan = made.plan("batch.micro_batch_size=2", *GAE, *sets)
    rows = [experience((3, 4)), experience((5,)), experience((6, 7, 8))]
    mine = rows if world.size == 1 else [rows[:2], rows[2:]][world.rank]
    arguments = {"pad_id": 0, "device": made.cpu, "tick": lambda *_: None}
    updates = learn([mine], policy, plan, world, beside=Beside(critic=critic, **beside), **arguments)
    return SimpleNamespace(updates=updates, log=log, policy=policy, critic=critic)


def test_the_critic_learns_after_the_policy(made: SimpleNamespace) -> None:
    found = steps(made, SoloWorld(), "batch.epochs=2")
    assert found.log == ["policy", "critic"] * 2
    assert [update.role for update in found.updates] == found.log
    assert found.updates[1].metrics["value_loss"] == pytest.approx(0.5)  # values 0, returns 1
    assert found.policy.version == found.critic.version == 2


def test_a_frozen_policy_stands_still(made: SimpleNamespace) -> None:
    known = stream()
    found = steps(made, SoloWorld(), policy_learns=False, supervised=known)
    assert found.log == ["critic"] and found.policy.version == 0 and found.critic.version == 1
    assert not found.policy.inner.seen and known.next_row == 0
    assert not found.policy.inner.table.detach().any() and found.critic.inner.table.detach().any()


def test_known_answers_have_a_denominator_of_their_own(made: SimpleNamespace) -> None:
    """Log-probs of 0 for the table's tokens: the gradient of a token is -coefficient x count / answer tokens of the update."""
    known = stream(rows_per_update=5)
    found = steps(made, SoloWorld(), supervised=known)
    gradient = -found.policy.inner.table.detach() / 0.5  # learning rate 0.5
    tokens = sum(len(ids) - prompt for ids, prompt in ROWS)
    assert tokens == 10
    assert float(gradient[8]) == pytest.approx(-1 / 6 - 0.5 * 3 / 10)  # once sampled with advantage 1, three times among the answers
    assert float(gradient[9]) == pytest.approx(-0.5 * 1 / 10)
    assert found.updates[0].metrics["ptx_loss"] == 0.0 and known.next_row == 5
    assert found.policy.temperatures == [None, None, 1.0, 1.0, 1.0]


def test_known_answers_on_two_ranks_give_the_same_update(made: SimpleNamespace) -> None:
    """Five rows are three on one rank, two on the other; of one row the other rank has a filler."""
    for count in (1, 5):
        solo = steps(made, SoloWorld(), supervised=stream(count)).policy.inner.table
        for found in made.on_ranks(2, lambda world, count=count: steps(made, world, supervised=stream(count))):
            assert found.policy.inner.table.tolist() == pytest.approx(solo.tolist(), abs=1e-9)
            assert found.updates[0].tokens == 6


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 5), passes=st.integers(1, 3))
def test_every_pass_has_every_row_once_in_an_order_of_its_own(seed: int, passes: int) -> None:
    found = [[stream(seed=seed).row(number) for number in range(5 * index, 5 * index + 5)] for index in range(passes)]
    assert all(sorted(order) == list(range(5)) for order in found)
    assert found == [[stream(seed=seed).row(number) for number in range(5 * index, 5 * index + 5)] for index in range(passes)]


def test_a_resumed_stream_goes_on_where_it_was(made: SimpleNamespace) -> None:
    world = SoloWorld()
    straight = stream(3)
    for _ in range(2):
        straight.take(world)
    resumed = stream(3)
    resumed.load_state_dict(straight.state_dict())
    for one, other in zip(straight.take(world), resumed.take(world), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
    with pytest.raises(ResumeError, match=r"train\.supervised\.data"):
        stream(3, rows=ROWS[1:]).load_state_dict(straight.state_dict())


def test_adaptive_kl_in_numbers(made: SimpleNamespace) -> None:
    """0.2, target 6, horizon 10000, 256 completions; a KL of 12, then 3, then 6.6; a restored controller goes on."""
    kl = "algorithm.kl={coefficient: 0.2, controller: {kind: adaptive, target: 6, horizon: 10000}}"
    control = KlControl(made.plan(kl).kl)
    for measured, expected in ((12.0, 0.201024), (3.0, 0.199995), (6.6, 0.200507)):
        control.after(measured, 256)
        assert control.coefficient == pytest.approx(expected, abs=1e-6)
        restored = KlControl(made.plan(kl).kl)
        restored.load_state_dict(control.state_dict())
        control = restored
    fixed = KlControl(made.plan("algorithm.kl.coefficient=0.2").kl)
    fixed.after(12.0, 256)
    assert fixed.coefficient == 0.2
