"""A curriculum of the user's own: what it says is held to what a run and its checkpoints can use, with the class named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftcli.data.curriculum import OwnCurriculum
from rftcli.errors import RftError

MODULE = """
class Order:
    STATE = {"seen": [1, 2], "rate": 0.5}
    def takes(self, row, turn): return turn % 2 == 0
    def after_step(self, step, groups): ...
    def state_dict(self): return self.STATE
    def load_state_dict(self, state): self.loaded = state
class Forgets(Order):
    def takes(self, row, turn): turn % 2
class Nothing(Order): STATE = None
class Sets(Order): STATE = {"seen": {1, 2}}
class Nan(Order): STATE = {"rate": float("nan")}
class Loops(Order):
    STATE = {}
    STATE["self"] = STATE
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_order_for_tests.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("own_order_for_tests", None)


def order(folder: Path, name: str) -> Any:
    return OwnCurriculum(f"own_order_for_tests:{name}", {}, [folder])


def test_it_is_asked_and_remembers(folder: Path) -> None:
    made = order(folder, "Order")
    assert [made.takes(None, turn) for turn in range(3)] == [True, False, True]
    assert made.state_dict() == {"own": {"seen": [1, 2], "rate": 0.5}}


@pytest.mark.parametrize("name", ["Nothing", "Sets", "Nan", "Loops"])
def test_a_state_that_no_checkpoint_can_hold_is_told_at_the_start(folder: Path, name: str) -> None:
    with pytest.raises(RftError, match=f"own_order_for_tests:{name}`.state_dict returned what JSON cannot hold"):
        order(folder, name)


def test_a_forgotten_return_is_not_a_no(folder: Path) -> None:
    with pytest.raises(RftError, match=r"Forgets`.takes returned None, expected True or False"):
        order(folder, "Forgets").takes(None, 0)
