"""The helper process of `reasoning_gym`: a task's own checker on one answer. Started by `worker.WorkerPool`, never imported by a run.

Some checkers call `eval` on the answer. While an answer is checked, this process may not write files, start programs or open connections: a belt
against accidents of a sampling model, not a sandbox against an attacker.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from rftcli.rewards.worker import serve

BOARD_TASKS = ("arc_agi", "rearc")
"""Their checkers compare with tuples, which are lists in a row that went through JSON."""
FORBIDDEN = ("os.", "pty.", "shutil.", "signal.", "socket.", "subprocess.")
ALLOWED = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")


def main() -> None:
    serve(prepare)


def prepare() -> Callable[[Any], float]:
    """The function {"task", "answer", "entry"} -> score. ValueError for a task that does not exist or a score that is no number."""
    from reasoning_gym import get_score_answer_fn

    sys.dont_write_bytecode = True  # a late import of a checker would be refused
    checker = functools.cache(get_score_answer_fn)
    checking = False

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        if checking and event not in ALLOWED and (event.startswith(FORBIDDEN) or (event == "open" and _writes(*arguments))):
            raise PermissionError(f"an answer tried `{event}` while it was checked")

    sys.addaudithook(guard)

    def score(request: Any) -> float:
        nonlocal checking
        check, entry = checker(request["task"]), request["entry"]
        if request["task"] in BOARD_TASKS:
            entry["metadata"]["output"] = tuple(tuple(row) for row in entry["metadata"]["output"])
        checking = True
        try:
            value = check(request["answer"], entry)
        finally:
            checking = False
        if not math.isfinite(value):
            raise ValueError(f"the checker of `{request['task']}` returned {value!r}")
        return float(value)

    return score


def _writes(_path: Any, mode: str | None, flags: int) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
