"""Programs run against tests: forms of tests, what counts as passed, and what the sandbox holds back."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from rftcli.rewards import code_tests as module
from rftcli.rewards.code_tests import isolation, last_program, read_tests, run_tests
from rftcli.rewards.inputs import RuleInput

ADD = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7\n"]}
SQUARES = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}
ASSERTS = ["assert f(2) == 4", "assert f(3) == 9"]
OK = {"inputs": [""], "outputs": ["ok"]}


def score(program: str, tests: Any, /, **options: Any) -> float:
    text = program if options.get("fence") is False else f"Here it is:\n```python\n{program}\n```\nDone."
    columns = {"checks": tests}
    item = RuleInput(text=text, prompt_text="", reference=tests, columns=columns, tokens=1, finish="stop", label="l", sample=0)
    return module.code_tests(item, **options)


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        (ADD, SUMS, 1), (ADD, [{"input": "1 2", "output": " 3 \n"}], 1), ("print(3)", SUMS, 0), ("print('3', 7)", SUMS, 0),
        ("def f(x): return x * x", SQUARES, 1), ("class Solution:\n    def f(self, x): return x * x", SQUARES, 1), ("def g(x): return 4", SQUARES, 0),
        ("def f(x): return x * x", ASSERTS, 1), ("def f(x): return 4", ASSERTS, 0), ("def f(x): return x * x", "\n".join(ASSERTS), 1),
        ("def f(x): return (x, 0.1 + 0.2)", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 0.3]]}, 1),
        ("def f(x): return True", {"fn_name": "f", "inputs": [[1]], "outputs": [1]}, 0),
        ("def f(x): return {1}", {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}, 0),
        ("def f(x: return", ASSERTS, 0), ("raise SystemExit(0)", ASSERTS, 0), ("import os\nos._exit(0)", ASSERTS, 0),
        ("import os\nos._exit(0)", SQUARES, 0),
        ("print('3')\nimport sys\nsys.exit(1)", {"inputs": [""], "outputs": ["3"]}, 0), ("def f(x): print('noise'); return x * x", SQUARES, 1),
    ],
)  # fmt: skip
def test_what_passes(program: str, tests: Any, expected: float) -> None:
    assert score(program, tests) == expected


def test_shares_columns_and_limits() -> None:
    assert score("print(3)", SUMS, partial=True) == 0.5
    assert score("def f(x): return 4", ASSERTS, most_tests=1) == 1
    assert score(ADD, SUMS, tests="checks") == 1
    assert score(ADD, SUMS, fence=False) == 1
    with pytest.raises(ValueError, match="the row has no tests"):
        score(ADD, SUMS, tests="other")


def test_which_block_is_the_program() -> None:
    text = "```python\nfirst\n```\n```py\nsecond\n```\n```text\noutput\n```"
    assert last_program(text) == "second\n"
    assert last_program("```\nfirst\n```\n```\nlast\n```") == "last\n"
    assert last_program("no block") is None and last_program("```python\nnever closed") is None
    assert last_program("```python\nx = '''a ``` b'''\n```") == "x = '''a ``` b'''\n"
    item = RuleInput(text=ADD, prompt_text="", reference=SUMS, columns={}, tokens=1, finish="stop", label="l", sample=0)
    assert module.code_tests(item) == 0.0


def test_time_and_memory_of_a_test() -> None:
    started = time.monotonic()
    found = run_tests("while True: pass", read_tests({"inputs": [""] * 9, "outputs": [""] * 9}), everything=True, seconds=2.0)
    assert found == {"passed": 0, "of": 9, "first": "test 1: it took too long"} and time.monotonic() - started < 15
    assert score("x = 'a' * (3 << 30)\nprint('ok')", OK) == 0
    assert score("x = 'a' * (1 << 28)\nprint('ok')", OK, memory_mib=128) == 0
    assert score("while True: print('x' * 1000)", OK) == 0  # its output file is full


def test_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = f"rft_mark_{os.getpid()}"
    program = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    {mark} = 1\n    time.sleep(60)\nprint('ok')"
    if isolation():  # a process that leaves its group is only caught by a process tree of its own
        assert score(program, OK) == 1
        deadline = time.monotonic() + 30
        while str(tmp_path) in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert score("open('made', 'w').write('x')\nprint('ok')", OK) == 1
    assert not list(tmp_path.iterdir())


def test_what_a_program_does_not_get() -> None:
    os.environ["RFT_TEST_SECRET"] = "hidden"
    try:
        assert score("import os\nprint('ok' if 'RFT_TEST_SECRET' not in os.environ else 'no')", OK) == 1
    finally:
        del os.environ["RFT_TEST_SECRET"]
    assert score("import importlib.util as u, sys\nprint('ok' if '' not in sys.path else 'no')", OK) == 1


def landlocked() -> bool:
    import ctypes

    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) >= 1


def test_files_and_network(tmp_path: Path) -> None:
    """Where the kernel offers it; docs/rewards.md says what holds elsewhere."""
    (tmp_path / "secret").write_text("ok")
    can_read = score(f"print(open({str(tmp_path / 'secret')!r}).read())", OK)
    score(f"open({str(tmp_path / 'written')!r}, 'w').write('x')\nprint('ok')", OK)
    assert (can_read, (tmp_path / "written").exists()) == ((0, False) if landlocked() else (1, True))
    listening = __import__("socket").create_server(("127.0.0.1", 0))
    reach = f"import socket\nsocket.create_connection(('127.0.0.1', {listening.getsockname()[1]}), 2)\nprint('ok')"
    assert score(reach, OK) == (0 if isolation() else 1)
    listening.close()


def test_an_answer_cannot_read_what_is_expected() -> None:
    """Not in its files: only the arguments reach it. Of the two tests, the second tells whether a file holds the first one's value."""
    looks = "sum(str(47 * 1001) in path.read_text(errors='replace') for path in pathlib.Path('..').rglob('*.*'))"
    program = f"import pathlib\ndef f(x):\n    return {looks}"
    assert score(program, {"fn_name": "f", "inputs": [[1], [2]], "outputs": [47047, 0]}, partial=True) == 0.5


@pytest.mark.parametrize(
    "tests",
    [
        None, "", [], {}, {"inputs": ["1"]}, [3], {"fn_name": "1f", "inputs": [[1]], "outputs": [1]},
        {"fn_name": "f", "inputs": [3], "outputs": [1]},
    ],
)
def test_tests_that_are_none(tests: Any) -> None:
    with pytest.raises(ValueError):
        read_tests(tests)


def test_arguments_as_lines_of_json() -> None:
    (test,) = read_tests({"fn_name": "f", "inputs": ['[1, 2]\n"x"'], "outputs": ["3"]})
    assert test == {"kind": "call", "name": "f", "arguments": [[1, 2], "x"], "output": 3}
    assert read_tests('["assert True"]') == [{"kind": "assert", "code": "assert True"}]
