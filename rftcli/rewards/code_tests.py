"""The rule `code_tests`: a Python program in the answer, run against the row's tests in processes of its own.

Tests stand in the row's reference, or in the column that `tests` names, as JSON or as text with JSON:
- {"inputs": [..], "outputs": [..]}: what is written to standard input, what has to be printed; or [{"input": .., "output": ..}, ...];
- the same with "fn_name": arguments of a function (or of a method of `class Solution`), and the value it has to return;
- a list of texts, or one text: Python code with asserts that is run behind the program, each on its own.

docs/rewards.md says what the sandbox protects. Leaves out other languages.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftcli.rewards.inputs import RuleInput, cut_after
from rftcli.rewards.rules import check_time_limit
from rftcli.rewards.worker import WorkerCrashed, WorkerTimeout

RUNNER = Path(__file__).with_name("code_runner.py")
START_SECONDS = 10.0
"""On top of the tests' own time: to start, to clean up, on a busy machine."""
ISOLATE = ("unshare", "--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child")
_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def code_tests(
    item: RuleInput,
    *,
    tests: str | None = None,
    partial: bool = False,
    fence: bool = True,
    most_tests: int | None = None,
    memory_mib: int = 1024,
    isolated: bool = False,
    after: str | None = None,
    time_limit_seconds: float = 5.0,
) -> float:
    """1 if the program in the answer passes all tests; with `partial` the share it passes, up to the first that takes too long. The limits are those
    of each test; a program over one of them has failed it. `fence`: the program is the last fenced block (a python one before others), and an answer
    without one has none; false: the whole text. `most_tests`: only the first so many. `isolated`: refuse to run where there is no network and
    process namespace. ValueError for tests that cannot be read; WorkerTimeout, WorkerCrashed where the tests could not be run."""
    wanted = read_tests(item.reference if tests is None else item.columns.get(tests))[:most_tests]
    text = cut_after(item.text, after)
    program = None if text is None else last_program(text) if fence else text
    if program is None:
        return 0.0
    outcome = run_tests(program, wanted, everything=partial, memory_mib=memory_mib, isolated=isolated, seconds=time_limit_seconds)
    return outcome["passed"] / outcome["of"] if partial else float(outcome["passed"] == outcome["of"])


def last_program(text: str) -> str | None:
    """The last fenced block that says it is Python; where none does, the last one of any kind."""
    blocks = _FENCE.findall(text)
    named = [code for language, code in blocks if language.lower() in ("python", "python3", "py")]
    return named[-1] if named else blocks[-1][1] if blocks else None


def run_tests(
    program: str,
    tests: Sequence[Mapping[str, Any]],
    *,
    everything: bool = False,
    memory_mib: int = 1024,
    isolated: bool = False,
    seconds: float = 5.0,
) -> dict[str, Any]:
    """{"passed", "of", "first": why the first failure failed or None}. WorkerTimeout, WorkerCrashed, RuntimeError."""
    prefix = isolation()
    if isolated and not prefix:
        raise RuntimeError("option `isolated`: this machine gives no process and network namespaces (`unshare` is missing or not allowed)")
    whole = len(tests) * (seconds + 1.0) + START_SECONDS
    with tempfile.TemporaryDirectory(prefix="rft-code-") as folder:
        job = {
            "program": program, "tests": list(tests), "all": everything, "seconds": seconds, "memory_bytes": memory_mib << 20, "folder": folder,
            "whole_seconds": whole + START_SECONDS,
        }  # fmt: skip
        process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-B", str(RUNNER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "TMPDIR": folder},
            start_new_session=True,
        )
        try:
            said, errors = process.communicate(json.dumps(job).encode(), timeout=whole)
        except subprocess.TimeoutExpired:
            raise WorkerTimeout(f"{len(tests)} tests gave no verdict within {whole:g} seconds") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
    try:
        outcome = json.loads(said)
    except ValueError:
        raise WorkerCrashed(f"the tests could not be run (exit code {process.returncode}): {errors.decode(errors='replace')[-500:]}") from None
    if "error" in outcome:
        raise WorkerCrashed(f"the tests could not be run: {outcome['error']}")
    return outcome


@functools.cache
def isolation() -> tuple[str, ...]:
    """The command that gives a process no network and a process tree of its own; empty where this machine does not allow it."""
    if shutil.which(ISOLATE[0]) is None:
        return ()
    tried = subprocess.run([*ISOLATE, sys.executable, "-I", "-c", ""], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    return ISOLATE if tried.returncode == 0 else ()


def read_tests(value: Any) -> list[dict[str, Any]]:
    """Tests of a row in one form: {"kind": stdin | call | assert, ...}. ValueError if there are none that can be read."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, str) and value.strip():
        return [{"kind": "assert", "code": value}]
    found = _pairs(value) if isinstance(value, Mapping) else _list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not found:
        raise ValueError("the row has no tests: a mapping with inputs and outputs, a list of them, or Python code with asserts")
    return found


def _pairs(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or isinstance(inputs, str) or isinstance(outputs, str):
        raise ValueError("tests need two lists, `inputs` and `outputs`")
    if len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
    return [_one(one, other, name) for one, other in zip(inputs, outputs, strict=True)]


def _list(value: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for test in value:
        if isinstance(test, str):
            found.append({"kind": "assert", "code": test})
        elif isinstance(test, Mapping) and "input" in test and "output" in test:
            found.append(_one(test["input"], test["output"], test.get("fn_name")))
        else:
            raise ValueError(f"a test is text or a mapping with input and output, got {str(test)[:80]}")
    return found


def _one(given: Any, wanted: Any, name: Any) -> dict[str, Any]:
    if name is None:
        if not isinstance(given, str) or not isinstance(wanted, str):
            raise ValueError("what is written to standard input and what is printed are texts; functions need `fn_name`")
        return {"kind": "stdin", "input": given, "output": wanted}
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"`fn_name` names a function, got {name!r}")
    if isinstance(given, str):  # a JSON value a line
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(given, Sequence):
        raise ValueError("the inputs of a function are a list of arguments")
    return {"kind": "call", "name": name, "arguments": list(given), "output": wanted}


def check_code(options: Mapping[str, Any]) -> list[str]:
    problems = check_time_limit(options)
    problems += [] if options["memory_mib"] >= 64 else [f"option `memory_mib` must be at least 64, got {options['memory_mib']}"]
    return problems + ([] if options["most_tests"] is None or options["most_tests"] >= 1 else ["option `most_tests` must be at least 1"])
