"""The helper process of `math_answer`: does math-verify hold two answers equal? Started by `worker.WorkerPool`, never imported by a run.

Leaves out time limits (the caller's clock) and finding the answer in a text (`mathtext`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from rftcli.rewards.worker import serve


def main() -> None:
    serve(prepare)


def prepare() -> Callable[[Any], bool]:
    """The function {"gold": text, "answer": text} -> bool. Its ValueError: the gold is not mathematics. An answer that is not is simply wrong.

    An exception while an answer is read counts as "not mathematics", so first two known answers are compared: if that fails, nothing would be
    found equal on this machine, and the helper refuses to start.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # it warns that its own (signal-based) time-outs are off
    how = [LatexExtractionConfig(), ExprExtractionConfig()]

    def read(text: str) -> list[Any]:
        return parse(f"${text}$", extraction_config=how, fallback_mode="no_fallback", parsing_timeout=None)

    @functools.lru_cache(maxsize=256)  # the samples of a group share their gold
    def read_gold(text: str) -> list[Any]:
        found = read(text)
        if not found:
            raise ValueError(f"the reference answer `{text}` cannot be read as mathematics")
        return found

    def equal(request: Any) -> bool:
        gold, answer = read_gold(request["gold"]), read(request["answer"])
        return bool(answer) and verify(gold, answer, timeout_seconds=None, raise_on_error=True)

    works = equal({"gold": r"\frac{1}{2}", "answer": r"\sqrt{\frac{1}{4}}"}) and not equal({"gold": "x+1", "answer": "x"})
    if not works:
        raise RuntimeError("math-verify does not work here: it gets a known answer wrong")
    return equal
