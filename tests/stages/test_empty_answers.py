"""An answer of no token at all: it is scored, counts in its group, trains nothing, and breaks nothing in any layout or pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rftcli.engines.fake import FakeSampler
from rftcli.protocols import Roles
from rftcli.runtime.world import SoloWorld
from rftcli.stages.collect import collect
from rftcli.stages.credit import credit
from rftcli.stages.learn import learn
from rftcli.stages.records import length_metrics, records_of


class Numbers:
    next_draw = 0

    def __init__(self, made: SimpleNamespace) -> None:
        self._made = made

    def draw(self, first: int, count: int) -> list[object]:
        return [self._made.prompt(draw) for draw in range(first, first + count)]


def answer(prompt: object, sample: int, settings: object) -> list[int]:
    """Every first sample is empty, and the whole of group 2."""
    return [] if sample == 0 or prompt.draw == 2 else [3, 4]  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_through_a_whole_step(made: SimpleNamespace, layout: str, updates: int, rows: int) -> None:
    plan = made.plan(
        f"batch={{layout: {layout}, updates_per_step: {updates}, micro_batch_size: {rows}}}", "rollout.engine=fake", "algorithm.kl.coefficient=0.1"
    )
    world = SoloWorld()
    engine = FakeSampler(lambda ids, skip_special_tokens: "".join(map(str, ids)), answer, vocab_size=9)
    scorer = made.Scores(lambda completion: 1.0 if completion.trace.ids else 0.0)
    collected = collect(Numbers(made), engine, scorer, plan, world, step=1, clock=lambda: 0.0, tick=lambda *_: None)  # type: ignore[arg-type]
    learner = made.Table(world, [-1.0] * 9)
    credited = credit(collected, Roles(policy=learner, reference=learner), plan, world, pad_id=0, device=made.cpu)
    assert len(credited.advantages) == 8 and credited.advantages[0, 0] < 0 < credited.advantages[0, 1]
    assert credited.advantages[2, 0] == credited.advantages[2, 1] == 0.0
    found = learn(credited.mini_batches, learner, plan, world, pad_id=0, device=made.cpu, tick=lambda *_: None)
    assert sum(update.tokens for update in found) == 3 * 2 and all(update.applied for update in found)
    lengths = length_metrics(records_of(collected.groups))
    assert lengths["response_tokens"]["min"] == 0 and lengths["response_tokens"]["mean"] == pytest.approx(6 / 8)
