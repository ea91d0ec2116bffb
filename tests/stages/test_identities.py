"""The identity of a group is its draw: no fresh prompt gets that of a group which still waits, whatever a resume has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rftcli.plan.plan_sampling import ReplayPlan
from rftcli.stages.drawing import Drawing, Memory
from rftcli.stages.replay import Replay, Waiting

PLAN = ReplayPlan(after_steps=1, times=1, share=1.0, max_waiting=9, below=None)


def drawing(turn: int, replay: Replay | None = None) -> Drawing:
    source: Any = SimpleNamespace(next_draw=turn, num_rows=100)
    return Drawing(source, Memory(replay=replay), step=5)


@pytest.mark.parametrize("newest", [-1, 3, 56, 57, 64])
@pytest.mark.parametrize("returned", [None, 0, 8])
def test_no_fresh_prompt_has_the_identity_of_one_that_waits(newest: int, returned: int | None) -> None:
    """57 rows were read and eight prompts came back: groups up to 64 may wait, and then the recipe's `replay` is taken out."""
    replay = None if returned is None else Replay(PLAN)
    if replay is not None and returned is not None:
        replay.returned, replay.waiting = returned, [Waiting(turn=2, due=0, returns=1)]
    made = drawing(57, replay)
    usual = 57 + (returned or 0)
    made.keep_clear(newest)
    asks = [*made.first(3).values(), *made.fresh(2)]
    draws = [ask.draw for ask in asks]
    assert draws == list(range(max(usual, newest + 1), max(usual, newest + 1) + 5))
    assert [ask.turn for ask in asks] == ([2, 57, 58, 59, 60] if replay is not None else [57, 58, 59, 60, 61])
