"""The rule `reasoning_gym`: the score that reasoning-gym's own checker gives, for rows with a column `entry` of {question, answer, metadata}.

The checkers run in a helper process: some of them evaluate the model's text as python or parse it as algebra, which may hang or do worse.
Leaves out making the rows, which is the data's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rftcli.rewards.find_answer import last_number
from rftcli.rewards.inputs import HeavyRule, RuleInput, cut_after
from rftcli.rewards.worker import WorkerPool


class ReasoningGym(HeavyRule):
    """Scores as they come from the task, often with a small share for a well-formed wrong answer; 0 if the text holds no answer to check."""

    def __init__(self) -> None:
        self._workers = WorkerPool("rftcli.rewards.gym_worker")

    def __call__(
        self, item: RuleInput, *, task: str | None = None, extract: str = "whole", after: str | None = None, time_limit_seconds: float = 10.0
    ) -> float:
        """`task` None: the one that the entry names. ValueError for a row without such an entry."""
        entry = read_entry(item.columns)
        task = task or entry["metadata"].get("source_dataset")
        if not isinstance(task, str):
            raise ValueError("the entry's metadata name no `source_dataset`; set the option `task`")
        text = cut_after(item.text, after)
        answer = None if text is None else answer_part(text, extract)
        if answer is None:
            return 0.0
        return self._workers.call({"task": task, "answer": answer, "entry": entry}, time_limit_seconds)

    def warm(self) -> None:
        self._workers.warm()

    def close(self) -> None:
        self._workers.close()


def answer_part(text: str, extract: str) -> str | None:
    """The part of `text` that is the answer, without white space around it; None if there is none. For `extract` see `rules.EXTRACT`.

    >>> answer_part("I think <answer> 7 </answer>", "answer_tag"), answer_part("it is 1,200.", "last_number")
    ('7', '1200')
    """
    if extract == "whole":
        return text.strip() or None
    if extract == "last_line":
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)
    if extract == "last_number":
        number = last_number(text)
        return None if number is None else re.sub(r"[,$€£\\{}!]", "", number)
    assert extract == "answer_tag", extract
    head, closing, _ = text.rpartition("</answer>")
    _, opening, answer = head.rpartition("<answer>")
    return (answer.strip() or None) if closing and opening else None


def read_entry(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """What reasoning-gym gave with the row. ValueError for a row without it."""
    entry = columns.get("entry")
    if not isinstance(entry, Mapping) or not {"question", "answer", "metadata"} <= set(entry) or not isinstance(entry["metadata"], Mapping):
        raise ValueError("the row has no column `entry` with question, answer and metadata")
    return entry
