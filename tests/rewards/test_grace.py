"""A reward function that never returns, in a run that was asked to stop: what counts as hanging, what it is called, and what goes on as before."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rftcli.errors import HeldUpError
from rftcli.rewards.grace import Grace
from rftcli.rewards.spec import CombineSpec, PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.types import Completion, FinishReason, Prompt, TokenTrace

MODULE = """
import asyncio, threading, time
GATE = threading.Event()
def hangs(completion):
    GATE.wait()
    return 1.0
async def sleeps(completion):
    await asyncio.sleep(3600)
async def blocks(completion):
    GATE.wait()
def slow(completion):
    time.sleep(0.2)
    return 1.0
def fine(completion): return 1.0
def together(scores):
    GATE.wait()
    return [1.0] * len(scores)
class Kept:
    def __call__(self, completion):
        GATE.wait()
        return 1.0
"""
GRACE = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("functions")
    (path / "hang_for_tests.py").write_text(MODULE)
    yield path
    import hang_for_tests  # found by the tables below, which leave its folder on the path

    hang_for_tests.GATE.set()


def completions(count: int) -> list[Completion]:
    prompt = Prompt(draw=3, row=0, row_id="r0", source="s", label="math", text="2+2=", token_ids=(1,))
    said: Any = {"text": "4", "text_with_special": "4", "trace": TokenTrace(ids=(5,)), "finish": FinishReason.STOP, "policy_version": 0}
    return [Completion(prompt=prompt, sample=index, **said) for index in range(count)]


def table(folder: Path, *names: str, asked: bool = True, combine: str | None = None, **more: Any) -> RewardTable:
    parts = tuple(PartSpec(name=name, kind="python", target=f"hang_for_tests:{name}", **more) for name in names)
    how = {} if combine is None else {"math": CombineSpec(how="python", target=f"hang_for_tests:{combine}")}
    return RewardTable({"math": parts}, search_path=[folder], combine=how, stop_asked=lambda: asked, grace_seconds=GRACE)


@pytest.mark.parametrize("name", ["hangs", "sleeps", "blocks", "Kept"])
def test_a_part_that_hangs_is_left_and_named(folder: Path, name: str) -> None:
    start = time.monotonic()
    with closing(table(folder, "fine", name)) as made:
        with pytest.raises(HeldUpError) as caught:
            list(made.score(completions(2)))
        assert GRACE <= time.monotonic() - start < 20 * GRACE
    assert f"reward part `{name}` (hang_for_tests:{name}) has not returned on row r0 (draw 3, sample " in str(caught.value)
    assert "`timeout_seconds`" in str(caught.value.hint)


def test_a_function_that_combines_is_no_exception(folder: Path) -> None:
    text = r"rewards.math.combine \(hang_for_tests:together\) has not returned on row r0"
    with closing(table(folder, "fine", combine="together")) as made, pytest.raises(HeldUpError, match=text):
        list(made.score(completions(2)))


def test_slow_parts_finish_their_step(folder: Path) -> None:
    """More of them, one after the other, than a grace is long."""
    with closing(table(folder, "slow")) as made:
        assert [sample.reward for sample in made.score(completions(66))] == [1.0] * 66  # 8 at a time: 9 x 0.2 s


def test_nothing_is_left_while_nobody_asks(folder: Path) -> None:
    made, found = table(folder, "slow", asked=False), []
    thread = threading.Thread(target=lambda: found.extend(made.score(completions(40))))
    with closing(made):
        thread.start()
        thread.join(30)
    assert len(found) == 40


def test_a_part_with_a_limit_is_an_error_as_ever(folder: Path) -> None:
    with closing(table(folder, "hangs", timeout_seconds=2 * GRACE)) as made:
        (sample,) = made.score(completions(1))
    assert sample.reward is None and "TimeoutError: no value within 2 seconds" in str(sample.parts[0].error)


def test_the_grace_counts_from_the_later_of_request_and_start() -> None:
    now, asked = [0.0], [False]
    grace = Grace(lambda: asked[0], seconds=12.0, clock=lambda: now[0])
    with grace.call("a part", "row 1"):
        for now[0], asked[0], held in ((500.0, False, False), (600.0, True, False), (611.0, True, False), (612.0, True, True)):
            assert fails(grace, held) == held
        with grace.call("another", "row 2"):
            pass
    now[0] = 5000.0
    with grace.call("a later one", "row 3"):
        assert not fails(grace, False)
        now[0] += 12.0
        assert fails(grace, True)
    assert not fails(grace, False)


def fails(grace: Grace, expected: bool) -> bool:
    """A look or two, through a future that is not done in time: by far not where it is expected to fail, however busy the machine is."""
    future: Future[int] = Future()
    timer = threading.Timer(60.0 if expected else 0.2, future.set_result, [1])  # a look every tenth of a second
    timer.start()
    try:
        return grace.result(future) != 1
    except HeldUpError:
        return True
    finally:
        timer.cancel()
        timer.join()
