"""A whole step of credit and learning at the edges, for every row of the tables, so that a new row is covered by itself; one rank and two."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftcli.algo.advantages import ADVANTAGES
from rftcli.algo.losses import LOSSES
from rftcli.algo.own_loss import own_loss
from rftcli.protocols import Roles
from rftcli.runtime.world import SoloWorld
from rftcli.stages.beside import Beside
from rftcli.stages.collect import Collected
from rftcli.stages.credit import Credited, credit
from rftcli.stages.learn import learn
from rftcli.stages.twins import GREEDY, with_twin_apart
from rftcli.types import Batch, Experience, Group, Update

Answers = Sequence[tuple[float | None, int]]
"""Of one group: (reward or None, sampled tokens)."""

STEPS: dict[str, Sequence[Answers]] = {
    "nothing scored": [[(None, 2), (None, 1)], [(None, 3), (None, 2)]],
    "no token at all": [[(1.0, 0), (0.0, 0)], [(0.5, 0), (0.5, 0)]],
    "an answer without a token": [[(1.0, 0), (0.0, 3)], [(0.0, 2), (1.0, 0)]],
    "one scored of its group": [[(0.7, 2), (None, 1)], [(1.0, 1), (0.0, 4)]],
    "errors on one rank alone": [[(1.0, 2), (0.0, 1)], [(None, 3), (None, 0)]],
    "one scored in all": [[(0.25, 2), (None, 1)], [(None, 3), (None, 2)]],
    "all alike": [[(0.1, 2), (0.1, 3)], [(0.1, 1), (0.1, 4)]],
    "huge": [[(1e30, 2), (-1e30, 1)], [(1.0, 1), (0.0, 2)]],
    "huge and alike": [[(1e30, 2), (1e30, 3)], [(1e30, 1), (1e30, 1)]],
    "one group against none": [[(1.0, 2), (0.0, 1)], []],
}
ALIKE = ("one scored in all", "all alike", "huge and alike")
"""No group has a spread."""
NEEDS: Mapping[str, tuple[str, ...]] = {
    "gae": ("models.critic={}",),
    "distill": ("models.teacher.path=org/teacher",),
    "python": ("algorithm.advantage={python: 'some:where'}",),
}
"""Estimator -> what it cannot be without."""
LOSS_NEEDS = {"cispo": "clip_high: 4", "python": "python: 'some:where'"}


class Worth:
    """A critic that says the same of everything."""

    def values(self, batch: Batch) -> torch.Tensor:
        return torch.full(batch.select.shape, 0.1)


def groups_of(made: SimpleNamespace, step: Sequence[Answers], *, twins: bool) -> list[Group]:
    found = []
    for draw, answers in enumerate(step):
        samples = [made.sample(draw, index, reward, ids=(1,) * size) for index, (reward, size) in enumerate(answers)]
        if twins and samples:
            rewards = [reward for reward, _ in answers if reward is not None]
            samples.insert(0, made.sample(draw, GREEDY, rewards[0] if rewards else None, ids=(1,)))
        found.append(with_twin_apart(Group(prompt=made.prompt(draw), samples=tuple(samples))))
    return found


def step_of(
    made: SimpleNamespace, step: Sequence[Answers], *sets: str, size: int, layout: str = "padded"
) -> list[tuple[Credited, Sequence[Update], torch.Tensor]]:
    """On each rank: what credit said, the policy's updates, and the policy after them."""
    plan = made.plan("rollout.max_new_tokens=16", f"batch.layout={layout}", *sets)
    groups = groups_of(made, step, twins=plan.rollout.greedy_twin)

    def work(world: Any) -> tuple[Credited, Sequence[Update], torch.Tensor]:
        policy, reference, teacher = (made.Table(world, [slope * token for token in range(10)]) for slope in (-0.1, -0.2, -0.15))
        roles = Roles(
            policy=policy,
            reference=None if plan.reference is None else reference,
            critic=None if plan.critic is None else Worth(),
            teacher=None if plan.teacher is None else teacher,
        )
        mine = tuple(group for group in groups[world.rank :: world.size] if group.samples)
        collected = Collected(mini_batches=(mine,), rollout_seconds=0.0, score_seconds=0.0)
        own = functools.partial(own_loss, function=lambda new, old, advantages: -advantages * (new - old).exp())
        arguments = {"pad_id": 0, "device": made.cpu}
        credited = credit(collected, roles, plan, world, estimator=lambda record: record["rewards"].tolist(), **arguments)
        beside = Beside(own_loss=own) if plan.loss.kind == "python" else Beside()
        updates: Sequence[Update] = ()
        if all(answers for answers in step):  # a pass is a collective: batches are such that every rank has a group in each
            updates = learn(credited.mini_batches, policy, plan, world, tick=lambda *_: None, beside=beside, **arguments)
        return credited, updates, policy.table.detach()

    return [work(SoloWorld())] if size == 1 else made.on_ranks(size, work)


def everything(found: Sequence[tuple[Credited, Any, Any]]) -> list[Experience]:
    return [item for credited, _, _ in found for mini_batch in credited.mini_batches for item in mini_batch]


def holds(found: Sequence[tuple[Credited, Sequence[Update], torch.Tensor]]) -> None:
    """Numbers everywhere; 0 where nothing is trained; unscored answers train nothing and have no advantage; nothing moves without a trained token."""
    for item in everything(found):
        assert torch.isfinite(item.advantages).all() and not item.advantages[~item.mask].any()
        assert item.sample.reward is not None or not item.mask.any()
    for credited, updates, table in found:
        assert all(torch.isfinite(torch.tensor(value)) for value in credited.advantages.values())
        assert torch.isfinite(table).all()
        for update in updates:
            assert update.applied == (update.tokens > 0)
            assert all(torch.isfinite(torch.tensor(float(value))) for value in update.metrics.values()), update.metrics


@pytest.mark.parametrize("step", [name for name in STEPS if name != "one group against none"])
@pytest.mark.parametrize("kind", ADVANTAGES)
def test_every_estimator_through_a_whole_step(made: SimpleNamespace, kind: str, step: str) -> None:
    for whiten in ("with_signal", "all", "off"):
        for size, layout in ((1, "padded"), (2, "packed")):
            sets = (f"algorithm.advantage={{kind: {kind}, whiten: '{whiten}', clip: 1.0e+31}}", *NEEDS.get(kind, ()), "algorithm.loss.kind=reinforce")
            found = step_of(made, STEPS[step], *sets, size=size, layout=layout)
            holds(found)
            if ADVANTAGES[kind].baseline and step in ALIKE and whiten != "all":
                assert not any(bool(item.advantages.any()) for item in everything(found)), "no spread, no advantage"


@pytest.mark.parametrize("step", [name for name in STEPS if name not in ("huge", "one group against none")])
@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_through_a_whole_step(made: SimpleNamespace, kind: str, step: str) -> None:
    """Two updates, so that the second has ratios; with a KL term, and with a group baseline no spread leaves that term alone."""
    loss = f"algorithm.loss={{kind: {kind}, {LOSS_NEEDS.get(kind, '')}}}"
    tables = []
    for size, layout in ((1, "packed"), (2, "padded")):
        found = step_of(made, STEPS[step], loss, "batch.epochs=2", "algorithm.kl={coefficient: 0.1, estimator: k3}", size=size, layout=layout)
        holds(found)
        tables.append(found[0][2])
    assert torch.allclose(tables[0], tables[1], atol=1e-6), "as on one rank"


@pytest.mark.parametrize("kind", [name for name, row in ADVANTAGES.items() if not {"old", "teacher", "values"} & set(row.inputs)])
def test_a_rank_without_a_prompt(made: SimpleNamespace, kind: str) -> None:
    """Statistics are of all ranks, and no rank waits for one that has nothing to say; of all estimators that need no pass of a model."""
    sets = (f"algorithm.advantage={{kind: {kind}}}", *NEEDS.get(kind, ()), "algorithm.loss.kind=reinforce")
    step = STEPS["one group against none"]
    alone, both = step_of(made, step, *sets, size=1), step_of(made, step, *sets, size=2)
    assert [item.advantages.tolist() for item in everything(both)] == [item.advantages.tolist() for item in everything(alone)]
    assert both[0][0].advantages == both[1][0].advantages == alone[0][0].advantages


@pytest.mark.parametrize("kind", [name for name, row in ADVANTAGES.items() if row.baseline])
def test_groups_without_signal_are_left_out_of_the_moments(made: SimpleNamespace, kind: str) -> None:
    """Beside a group whose answers are alike, one with a single score, and one without any, the others have the advantages that they have alone."""
    alone = [[(1.0, 2), (0.25, 3), (0.0, 1)], [(0.5, 1), (0.0, 2), (0.75, 1)]]
    flat = [[(0.3, 4), (0.3, 1)], [(0.9, 2), (None, 5)], [(None, 1), (None, 1)]]
    plain, beside = (
        step_of(made, step, f"algorithm.advantage.kind={kind}", "algorithm.loss.kind=reinforce", size=1) for step in (alone, [*alone, *flat])
    )
    factor = 2.0 if kind == "gpg" else 1.0  # alpha: groups over groups with spread, 4 over 2 where something was scored
    wanted = [(factor * item.advantages).tolist() for item in everything(plain)]
    assert [item.advantages.tolist() for item in everything(beside)[:6]] == [pytest.approx(values, rel=1e-6) for values in wanted]
    assert not any(bool(item.advantages.any()) for item in everything(beside)[6:])
