"""Code of the user that exits, forks or fails while it closes: an error of its own, told by name, and never the end of what it runs in."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rftcli.data.curriculum import OwnCurriculum
from rftcli.errors import RftError, UsageError
from rftcli.rewards.event_loop import EventLoop
from rftcli.rewards.scorers.own import OwnScorer
from rftcli.rewards.scorers.view import View
from rftcli.rewards.spec import CombineSpec, PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.runtime.own_estimator import load_estimator
from rftcli.types import Completion, FinishReason, Prompt, ScoredSample, TokenTrace

MODULE = """
import asyncio, os, sys

class Own(BaseException): pass

def exits(completion): sys.exit(3)
def interrupts(completion): raise KeyboardInterrupt
def own(completion): raise Own("mine")
async def exits_later(completion): await asyncio.sleep(0.001); sys.exit(3)
async def interrupts_later(completion): await asyncio.sleep(0.001); raise KeyboardInterrupt
async def fine(completion): await asyncio.sleep(0.001); return 1.0
def plain(completion): return 1.0
def group(scores): sys.exit(3)
def forks(completion):
    child = os.fork()
    if child == 0:
        sys.exit(3)
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
async def forks_later(completion):
    child = os.fork()
    if child == 0:
        return 1.0  # not the rank's: its loop is a copy that nobody waits for
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
def group_forks(scores):
    child = os.fork()
    if child == 0:
        return [1.0 for _ in scores]
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(scores)
class Wordless(Exception):
    def __str__(self): raise RuntimeError("no words")
def wordless(completion): raise Wordless
def estimate(rewards): sys.exit(3)
class Closes:
    def __call__(self, completion): return 1.0
    def close(self): raise RuntimeError("already closed")
class ClosesScorer:
    def __init__(self, device): pass
    def score(self, batch): sys.exit(3)
    def close(self): sys.exit(4)
class NotMade:
    def __init__(self): sys.exit(3)
    def __call__(self, completion): return 1.0
class Order:
    def takes(self, row, turn): sys.exit(3)
    def after_step(self, step, groups): ...
    def state_dict(self): return {}
    def load_state_dict(self, state): ...
"""
NAME = "ends_itself_for_tests"
T = TypeVar("T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ends")
    (folder / f"{NAME}.py").write_text(MODULE)
    (folder / "script_for_tests.py").write_text("import sys\nsys.exit(3)\n")
    yield folder
    while str(folder) in sys.path:
        sys.path.remove(str(folder))


def completions(count: int) -> list[Completion]:
    prompt = Prompt(draw=3, row=0, row_id="r0", source="s", label="math", text="2+2=", token_ids=(1,))
    said: Any = {"text": "4", "text_with_special": "4", "trace": TokenTrace(ids=(5,)), "finish": FinishReason.STOP, "policy_version": 0}
    return [Completion(prompt=prompt, sample=index, **said) for index in range(count)]


def part(function: str, **more: Any) -> PartSpec:
    return PartSpec(name=function, kind="python", target=f"{NAME}:{function}", **more)


def score(folder: Path, *parts: PartSpec, combine: str | None = None) -> list[ScoredSample]:
    how = {} if combine is None else {"math": CombineSpec(how="python", target=f"{NAME}:{combine}")}
    with closing(RewardTable({"math": parts}, combine=how, search_path=[folder])) as table:
        return list(table.score(completions(3)))


def within(seconds: float, call: Callable[[], T]) -> T:
    """What the call returns; a failure where it hangs."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return found[0]


@pytest.mark.parametrize("limit", [None, 30.0])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("exits", "SystemExit: 3"),
        ("interrupts", "KeyboardInterrupt"),
        ("own", "Own: mine"),
        ("exits_later", "SystemExit: 3"),
        ("interrupts_later", "KeyboardInterrupt"),
    ],
)
def test_a_part_that_ends_itself_is_an_error_of_its_sample(folder: Path, name: str, error: str, limit: float | None) -> None:
    found = within(60, lambda: score(folder, part("fine"), part(name, timeout_seconds=limit)))
    assert [sample.reward for sample in found] == [None] * 3
    for sample in found:
        fine, failed = sample.parts
        assert fine.value == 1.0 and failed.error is not None and f"{NAME}:{name}: {error}" in failed.error


def test_the_event_loop_outlives_an_exit() -> None:
    async def exits() -> None:
        sys.exit(3)

    async def fine() -> int:
        return 7

    with closing(EventLoop()) as loop:
        for limit in (None, 5.0):
            with pytest.raises(SystemExit):
                loop.run(exits(), limit)
            assert loop.run(fine(), limit) == 7


def test_a_combining_function_that_exits(folder: Path) -> None:
    found = within(60, lambda: score(folder, part("plain"), combine="group"))
    assert all(sample.reward is None and sample.error is not None and "SystemExit: 3" in sample.error for sample in found)


@pytest.mark.parametrize("limit", [None, 30.0])
@pytest.mark.parametrize("name", ["forks", "forks_later"])
def test_a_child_that_a_part_has_forked_does_not_go_on_as_the_rank(folder: Path, name: str, limit: float | None) -> None:
    """It ends with the code of a failure, which is what its parent gives as reward."""
    found = within(60, lambda: score(folder, part(name, timeout_seconds=limit)))
    assert [sample.reward for sample in found] == [1.0] * 3


def test_a_child_of_a_combining_function_does_not_go_on_either(folder: Path) -> None:
    found = within(60, lambda: score(folder, part("plain"), combine="group_forks"))
    assert [sample.reward for sample in found] == [1.0] * 3


def test_an_error_without_words_is_an_error_of_its_sample(folder: Path) -> None:
    found = within(60, lambda: score(folder, part("wordless")))
    assert all("Wordless: its text cannot be made (RuntimeError)" in str(sample.parts[0].error) for sample in found)


def test_a_scorer_that_exits_is_an_error_of_its_rows(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    scorer = OwnScorer(f"{NAME}:ClosesScorer", {}, "cpu", [folder])
    view = View(prompt="q", messages=(), completion="a", reference=None, label="math", columns={}, place="row 0")
    (error,) = scorer.score([view])
    assert "SystemExit: 3" in str(error)
    with caplog.at_level(logging.WARNING, "rft"):
        scorer.close()
    assert "ClosesScorer`.close failed: SystemExit: 4" in caplog.text


def test_a_close_that_fails_is_logged_and_hides_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rft"):
        found = score(folder, part("Closes"))
    assert [sample.reward for sample in found] == [1.0] * 3
    assert "Closes`.close failed: RuntimeError: already closed" in caplog.text


def test_what_exits_while_it_is_made_or_asked(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"NotMade. could not be made: SystemExit: 3"):
        RewardTable({"math": [part("NotMade")]}, search_path=[folder])
    with pytest.raises(RftError, match="failed: SystemExit: 3"):
        load_estimator(f"{NAME}:estimate", {}, [folder])({"rewards": [1.0]})
    with pytest.raises(UsageError, match="cannot be imported: SystemExit: 3"):
        load_estimator("script_for_tests:estimate", {}, [folder])
    order: Any = OwnCurriculum(f"{NAME}:Order", {}, [folder])
    with pytest.raises(RftError, match="takes failed with SystemExit: 3"):
        order.takes(None, 0)
