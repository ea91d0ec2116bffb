"""`algorithm.loss.python`: what is imported, what it takes, and the words for everything that is wrong with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rftcli.errors import UsageError
from rftcli.runtime.own_loss import load_loss

MODULE = """
number = 3
def plain(new, old, advantages): return -advantages * new
def all_of_it(new, old, advantages, *, sequence, num_sequences, beta=0.1): return new
def anything(new, old, advantages, **options): return new
def needs(new, old, advantages, *, beta): return new
def few(new, old): return new
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_loss_module.py").write_text(MODULE)
    (tmp_path / "broken_loss_module.py").write_text("1 / 0")
    yield tmp_path  # type: ignore[misc]
    for name in ("own_loss_module", "broken_loss_module"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "options", "asks"),
    [
        ("plain", {}, ()),
        ("all_of_it", {"beta": 1}, ("sequence", "num_sequences")),
        ("all_of_it", {}, ("sequence", "num_sequences")),
        ("anything", {"x": 1}, ()),
        ("needs", {"beta": 2}, ()),
    ],
)
def test_what_it_takes(folder: Path, name: str, options: dict[str, int], asks: tuple[str, ...]) -> None:
    found = load_loss(f"own_loss_module:{name}", options, [folder])
    assert found.asks == asks and found.function.__name__ == name


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("no_such_module:f", {}, r"`no_such_module:f` cannot be imported: ModuleNotFoundError"),
        ("broken_loss_module:f", {}, r"cannot be imported: ZeroDivisionError: division by zero"),
        ("own_loss_module:absent", {}, r"`own_loss_module` has no function `absent`"),
        ("own_loss_module:number", {}, r"`own_loss_module` has no function `number`"),
        ("own_loss_module:few", {}, r"cannot be called with \(new, old, advantages\) and no options: too many positional arguments"),
        ("own_loss_module:needs", {}, r"cannot be called with .* missing a required argument: 'beta'"),
        ("own_loss_module:plain", {"beta": 1}, r"and beta: got an unexpected keyword argument 'beta'"),
    ],
)
def test_what_is_wrong(folder: Path, target: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_loss(target, options, [folder])
    assert caught.value.hint


def test_checking_a_recipe_loads_no_torch() -> None:
    code = "import sys, rftcli.runtime.own_loss, rftcli.runtime.recipe_checks; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
