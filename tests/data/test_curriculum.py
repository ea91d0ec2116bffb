"""A curriculum of the user's own: what it must have, what it is asked and told, and whose errors are whose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rftcli.data.curriculum import OwnCurriculum
from rftcli.data.rows import Row
from rftcli.errors import RftError, UsageError

OWN = """\
class Mine:
    def __init__(self, hardest=1): self.hardest, self.seen = hardest, []
    def takes(self, row, turn): return row.columns["number"] <= self.hardest
    def after_step(self, step, groups): self.seen += [(step, group.row, group.rewards) for group in groups]; self.hardest += 1
    def state_dict(self): return {"hardest": self.hardest}
    def load_state_dict(self, state): self.hardest = state["hardest"]

class Lacks:
    def takes(self, row, turn): return True

class Breaks(Mine):
    def takes(self, row, turn): raise ValueError("no idea")
"""


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (tmp_path / f"own_{request.node.name}.py").write_text(OWN)
    return tmp_path


def make(folder: Path, name: str, **options: Any) -> OwnCurriculum:
    (module,) = folder.glob("own_*.py")
    return OwnCurriculum(f"{module.stem}:{name}", options, [folder])


def test_it_is_asked_told_and_remembered(folder: Path, make_row: Callable[..., Row]) -> None:
    own = make(folder, "Mine", hardest=2)
    assert [own.takes(make_row("a", number), 0) for number in range(4)] == [True, True, True, False]
    own.after(1, [SimpleNamespace(source="n", row=7, rewards=(1.0, None), values=())])  # type: ignore[list-item]
    assert own.takes(make_row("a", 3), 0) and own.state_dict() == {"own": {"hardest": 3}}
    again = make(folder, "Mine")
    again.load_state_dict(own.state_dict())
    assert again.takes(make_row("a", 3), 0)


def test_what_it_lacks(folder: Path) -> None:
    with pytest.raises(UsageError, match="has no method `after_step`"):
        make(folder, "Lacks")
    with pytest.raises(UsageError, match="failed with TypeError"):
        make(folder, "Mine", unknown=1)
    with pytest.raises(UsageError, match="Nothing"):
        make(folder, "Nothing")


def test_its_errors_are_told_with_its_name(folder: Path, make_row: Callable[..., Row]) -> None:
    with pytest.raises(RftError, match=r"Breaks`\.takes failed with ValueError: no idea"):
        make(folder, "Breaks").takes(make_row("a"), 0)
