"""A user's estimator: found beside the recipe, asked what it takes, and held to one finite number a completion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rftcli.errors import RftError, UsageError
from rftcli.runtime.own_estimator import RECORD, load_estimator
from rftcli.stages.estimator_inputs import Scored, own_record

MODULE = """
import torch

NUMBER = 3

def ranks(rewards, group, *, power=1.0):
    return (rewards - rewards.mean()) ** power

def everything(**record):
    assert len(record) == SIZE
    return list(record["rewards"])

def options(rewards, *, needed):
    return [needed] * len(rewards)

def unknown(rewards, hidden_states):
    return rewards

def few(rewards):
    return rewards[:-1]

def none(rewards):
    return None

def text(rewards):
    return ["x"] * len(rewards)

def nan(rewards):
    return rewards * float("nan")

def huge(rewards):
    return rewards * 1e300

def digits(rewards):
    return [10**400] * len(rewards)

def table(rewards):
    return rewards[:, None].expand(-1, 2)

def breaks(rewards):
    raise KeyError("gone")
""".replace("SIZE", str(len(RECORD)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("estimators")
    (path / "my_estimators_here.py").write_text(MODULE)
    (path / "my_broken_estimators.py").write_text("import nothing_of_the_kind")
    return path


def record() -> Mapping[str, Any]:
    rows = [Scored(draw=0, sample=index, label="l", reward=float(index), trained_tokens=2, greedy=None, parts=()) for index in range(3)]
    return own_record(rows)


def test_it_gets_what_it_asks_for(folder: Path) -> None:
    assert set(record()) == set(RECORD)
    assert load_estimator("my_estimators_here:ranks", {}, [folder])(record()) == [-1.0, 0.0, 1.0]
    assert load_estimator("my_estimators_here:ranks", {"power": 2.0}, [folder])(record()) == [1.0, 0.0, 1.0]
    assert load_estimator("my_estimators_here:everything", {}, [folder])(record()) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("no_such_module:f", {}, "cannot be imported: ModuleNotFoundError"),
        ("my_broken_estimators:f", {}, "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("my_estimators_here:NUMBER", {}, "has no function `NUMBER`"),
        ("my_estimators_here:absent", {}, "has no function `absent`"),
        ("my_estimators_here:unknown", {}, "cannot be called: missing a required argument: 'hidden_states'"),
        ("my_estimators_here:options", {}, "cannot be called: missing a required argument: 'needed'"),
        ("my_estimators_here:ranks", {"pwoer": 2}, "cannot be called: got an unexpected keyword argument 'pwoer'"),
        ("my_estimators_here:ranks", {"rewards": 2}, "have names that a step's record has"),
    ],
)
def test_it_is_refused_before_anything_loads(folder: Path, target: str, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_estimator(target, options, [folder])
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few", "returned 2 numbers for 3 scored completions"),
        ("none", "returned a NoneType, expected 3 numbers"),
        ("text", "returned a list, expected 3 numbers"),
        ("nan", "returned nan for completion 0 of 3"),
        ("huge", "returned 1e+300 for completion 1 of 3, expected a finite number of at most 1e+12"),
        ("digits", "returned a list, expected 3 numbers"),
        ("table", "returned a Tensor of shape (3, 2), expected 3 numbers"),
        ("breaks", "failed: KeyError: 'gone'"),
    ],
)
def test_what_it_returns_is_checked(folder: Path, name: str, message: str) -> None:
    estimator = load_estimator(f"my_estimators_here:{name}", {}, [folder])
    with pytest.raises(RftError) as caught:
        estimator(record())
    assert message in caught.value.message and isinstance(record()["rewards"], torch.Tensor)
