"""User functions: finding them, what they are given, and what they may return."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rftcli.errors import UsageError
from rftcli.rewards.event_loop import EventLoop
from rftcli.rewards.functions import RECORD, as_number, describe, load_function

MODULE = """
import asyncio
import threading

CONSTANT = 3

def plain(completion, reference): return float(completion == reference)
def everything(**kwargs): return sorted(kwargs)
def with_options(completion, *, scale, offset=0): return len(completion) * scale + offset
def defaulted(completion, unknown=1): return unknown
def greedy(completion, refrence): return 0
def positional(completion, /): return 0
def late(completion): import neighbour_for_tests; return neighbour_for_tests.VALUE
def boom(completion): raise RuntimeError("no luck")
async def slow(completion): await asyncio.sleep(0.01); return len(completion)
async def where(): return threading.current_thread().name

class Scorer:
    def __call__(self, completion): return len(completion)
    @staticmethod
    def length(completion): return len(completion)

class AsyncScorer:
    async def __call__(self, tokens): return tokens

scorer = Scorer()
async_scorer = AsyncScorer()
def of_a_column(completion, level): return 0
"""
RECORD_OF_ONE: dict[str, Any] = {name: None for name in RECORD} | {"completion": "four", "reference": "four", "tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "functions_for_tests.py").write_text(MODULE)
    (folder / "neighbour_for_tests.py").write_text("VALUE = 11\n")
    (folder / "fails_for_tests.py").write_text("import no_such_library_for_tests\n")
    (folder / "raises_for_tests.py").write_text("1 / 0\n")
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("plain", {}, 1.0),
        ("everything", {}, sorted(RECORD)),
        ("everything", {"scale": 2}, sorted([*RECORD, "scale"])),
        ("with_options", {"scale": 2}, 8),
        ("with_options", {"scale": 2, "offset": 1}, 9),
        ("defaulted", {}, 1),
        ("defaulted", {"unknown": 5}, 5),
        ("late", {}, 11),
        ("slow", {}, 4),
        ("where", {}, "async-rewards"),
        ("scorer", {}, 4),
        ("async_scorer", {}, 2),
        ("Scorer.length", {}, 4),
    ],
)
def test_a_function_gets_what_it_asks_for(folder: Path, loop: EventLoop, target: str, options: dict[str, Any], expected: Any) -> None:
    function = load_function(f"functions_for_tests:{target}", options, [folder], loop)
    assert function(RECORD_OF_ONE) == expected


@pytest.mark.parametrize(
    ("target", "options", "message", "hint"),
    [
        ("functions_for_tests", {}, "does not name a function", "write `package.module:function`"),
        ("functions_for_tests:a b", {}, "does not name a function", "write `package.module:function`"),
        ("my rewards.py:f", {}, "does not name a function", "write `package.module:function`"),
        ("function_for_tests:plain", {}, "there is no module `function_for_tests`; looked in /", "did you mean `functions_for_tests`?"),
        ("functions_for_tests.sub:plain", {}, "there is no module `functions_for_tests.sub`", "did you mean `functions_for_tests`?"),
        ("functions_for_tests:plein", {}, "has no `plein`", "did you mean `plain`?"),
        ("sys:plain", {}, r"`sys` \(built-in\) has no `plain`", None),
        ("functions_for_tests:CONSTANT", {}, "is a int, which cannot be called", None),
        ("functions_for_tests:greedy", {}, "asks for `refrence`, which no completion has", "did you mean `reference`?"),
        ("functions_for_tests:positional", {}, "asks for `completion`, which no completion has", "did you mean `completion`?"),
        ("functions_for_tests:with_options", {}, "asks for `scale`, which no completion has", None),
        (
            "functions_for_tests:of_a_column", {}, "asks for `level`, which no completion has",
            'did you mean `label`?; a column of the data is `columns["level"]`',
        ),
        ("functions_for_tests:with_options", {"scale": 1, "ofset": 1}, "takes no option `ofset`", "did you mean `offset`?"),
        ("functions_for_tests:everything", {"prompt": 1}, r"options \['prompt'\] have names that the record", None),
        ("fails_for_tests:f", {}, "importing `fails_for_tests` failed: No module named 'no_such_library_for_tests'", None),
        ("raises_for_tests:f", {}, r"importing `raises_for_tests` failed: ZeroDivisionError: division by zero \(raises_for_tests.py:1\)", None),
    ],
)
def test_what_cannot_be_called_is_said(folder: Path, target: str, options: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_function(target, options, [folder])
    if hint is not None:
        assert caught.value.hint == hint


def test_the_folder_is_searched_first_while_importing_and_last_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, installed = tmp_path / "own", tmp_path / "installed"
    for place in (own, installed):
        place.mkdir()
        for name in ("shadowing_for_tests", "late_for_tests"):
            (place / f"{name}.py").write_text(f"def where(): return {place.name!r}\n")
    (own / "shadowing_for_tests.py").write_text("def where():\n    import late_for_tests\n    return 'own', late_for_tests.where()\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    assert load_function("shadowing_for_tests:where", {}, [own])({}) == ("own", "installed")
    assert sys.path[-2:] == [str(installed), str(own)]
    (own / "second_for_tests.py").write_text("def where(): return 'own'\n")
    (installed / "second_for_tests.py").write_text("def where(): return 'installed'\n")
    assert load_function("second_for_tests:where", {}, [own])({}) == "own"
    assert sys.path[-2:] == [str(installed), str(own)]


def test_asynchronous_functions_run_side_by_side(loop: EventLoop) -> None:
    meeting: list[int] = []

    async def meet() -> int:
        meeting.append(1)
        while len(meeting) < 3:  # ends only if three run at once
            await asyncio.sleep(0.001)
        return 1

    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(loop.run(meet()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert results == [1, 1, 1]


def test_a_closed_loop_cancels_what_runs_and_takes_nothing_more() -> None:
    loop, started, ended = EventLoop(), threading.Event(), []

    async def forever() -> None:
        started.set()
        await asyncio.sleep(3600)

    def call() -> None:
        try:
            loop.run(forever())
        except BaseException as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=call)
    thread.start()
    assert started.wait(5)
    loop.close()
    thread.join(5)
    assert ended == ["CancelledError"]
    with pytest.raises(RuntimeError, match="was closed"):
        loop.run(forever())
    loop.close()


@pytest.mark.parametrize(
    ("value", "number"),
    [(None, None), (0.5, 0.5), (1, 1.0), (True, 1.0), (Fraction(1, 4), 0.25), (numpy.float32(0.5), 0.5), (numpy.int64(3), 3.0), (-0.0, 0.0)],
)
def test_one_number_or_none(value: Any, number: float | None) -> None:
    assert as_number("m:f", value) == number
    assert number is None or type(as_number("m:f", value)) is float


async def coroutine() -> float:
    return 1.0


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([0.5], r"got 1 values \(list\): \[0.5\]"),
        ([1.0, 0.0], r"got 2 values \(list\)"),
        ((1.0,) * 5, r"got 5 values \(tuple\)"),
        ({"score": 1.0}, r"got 1 values \(dict\)"),
        ((x for x in [1.0]), "got a generator"),
        ("0.5", "got a str: '0.5'"),
        (["a", "b", "c", "d"], r"got 4 values \(list\)"),
        (b"1", "got a bytes"),
        (1j, "got a complex"),
        (torch.zeros(4, 1), r"got 4 values \(Tensor\)"),
        (torch.tensor(0.5), r"got a Tensor without dimensions \(`.item\(\)` makes a number of it\)"),
        (numpy.array(0.5), "got a ndarray without dimensions"),
        (numpy.array([0.5]), r"got 1 values \(ndarray\)"),
        (coroutine(), r"got a coroutine that was not awaited \(declare the function `async def`\)"),
    ],
)
def test_anything_else_is_an_error_that_names_the_function_and_the_counts(value: Any, got: str) -> None:
    with pytest.raises(TypeError, match=r"`m:f` must return 1 number for 1 completion, or None; " + got):
        as_number("m:f", value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e13, -1e300, numpy.float32("nan"), 10**400])
def test_a_value_that_is_not_finite_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match=r"`m:f` returned .*, expected a finite number of at most 1e\+12"):
        as_number("m:f", value)


def test_an_error_is_described_with_its_place(folder: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        load_function("functions_for_tests:boom", {}, [folder])({**RECORD_OF_ONE})
    assert describe(caught.value) == "RuntimeError: no luck (functions_for_tests.py:14)"
    assert describe(caught.value, place=False) == "RuntimeError: no luck"
    assert describe(KeyError()) == "KeyError"


def test_errors_that_differ_in_an_address_alone_are_one() -> None:
    class Mark:
        pass

    texts = set()
    for mark in (Mark(), Mark()):
        with pytest.raises(TypeError) as caught:
            as_number("m:f", mark)
        texts |= {describe(caught.value), describe(RuntimeError(f"cannot judge {mark!r}"))}
    assert len(texts) == 2 and not any("0x" in text for text in texts)


def test_a_signal_based_limit_is_explained() -> None:
    error = ValueError("signal only works in main thread of the main interpreter")
    assert describe(error).endswith("switch the library's own signal-based time limit off, or use the rule `math_answer`")


def test_a_module_that_ends_the_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "leaves_at_import.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UsageError, match="ends the program"):
        load_function("leaves_at_import:f", {}, [tmp_path])


def test_what_a_module_prints_at_import_is_no_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talks_at_import.py").write_text("import os\nprint('hello')\nos.write(1, b'raw')\ndef f(completion):\n    return 1.0\n")
    load_function("talks_at_import:f", {}, [tmp_path])
    out, err = capfd.readouterr()
    assert out == "" and "hello" in err and "raw" in err
