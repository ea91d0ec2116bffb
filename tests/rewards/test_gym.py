"""reasoning_gym: its own checkers on rows that went through JSON, in a helper process."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from rftcli.rewards.gym import ReasoningGym, answer_part
from rftcli.rewards.inputs import RuleInput
from rftcli.rewards.spec import PartSpec
from rftcli.rewards.table import RewardTable
from rftcli.rewards.worker import WorkerError


@pytest.fixture(scope="module")
def rule() -> Iterator[ReasoningGym]:
    rule = ReasoningGym()
    yield rule
    rule.close()


def row(task: str) -> dict[str, Any]:
    return json.loads(json.dumps(reasoning_gym.create_dataset(task, size=1, seed=3)[0]))


def item(text: str, columns: dict[str, Any]) -> RuleInput:
    return RuleInput(text=text, prompt_text="q", reference=None, columns=columns, tokens=1, finish="stop", label="gym", sample=0)


def test_a_table_starts_the_helper_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports take seconds, and the model and the engine are loaded meanwhile."""
    opened: list[ReasoningGym] = []
    monkeypatch.setattr("rftcli.rewards.table.open_rule", lambda _: opened.append(ReasoningGym()) or opened[-1])
    part = PartSpec(kind="rule", target="reasoning_gym", name="gym", weight=1.0, options={"task": "chain_sum"})
    with closing(RewardTable({"a": [part], "b": [part]})):
        (rule,) = opened
        assert len(rule._workers.pids()) == 1
    assert rule._workers.pids() == []


@pytest.mark.parametrize(
    "task", ["chain_sum", "leg_counting", "countdown", "spell_backward", "polynomial_equations", "rearc", "sudoku", "needle_haystack"]
)
def test_the_gold_answer_scores_1_and_nonsense_does_not(rule: ReasoningGym, task: str) -> None:
    entry = row(task)
    assert rule(item(entry["answer"], {"entry": entry})) == pytest.approx(1.0)
    assert rule(item("<nonsense>", {"entry": entry})) < 0.5
    assert rule(item("  \n", {"entry": entry})) == 0.0


def test_partial_scores_come_as_they_are(rule: ReasoningGym) -> None:
    entry = {"question": "6 + 6", "answer": "12", "metadata": {"source_dataset": "chain_sum"}}
    assert rule(item("12", {"entry": entry})) == 1.0
    assert rule(item("is 12!", {"entry": entry})) == pytest.approx(2 / 6)  # its rule: share of the text that is the answer
    assert rule(item("is 12!", {"entry": entry}), extract="last_number") == 1.0


def test_the_task_is_named_by_the_entry_or_by_the_option(rule: ReasoningGym) -> None:
    entry = {"question": "6 + 6", "answer": "12", "metadata": {}}
    assert rule(item("12", {"entry": entry}), task="chain_sum") == 1.0
    with pytest.raises(ValueError, match="set the option `task`"):
        rule(item("12", {"entry": entry}))
    with pytest.raises(WorkerError, match="Dataset 'no_such_task' not registered"):
        rule(item("12", {"entry": entry}), task="no_such_task")


@pytest.mark.parametrize("columns", [{}, {"entry": None}, {"entry": "text"}, {"entry": {"question": "q", "answer": "a"}}])
def test_a_row_without_an_entry_is_an_error(rule: ReasoningGym, columns: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no column `entry`"):
        rule(item("12", columns))


@pytest.mark.parametrize(
    ("text", "extract", "answer"),
    [
        (" 7 \n", "whole", "7"),
        (" ", "whole", None),
        ("so\n -4 \r\n\n", "last_line", "-4"),
        ("\n", "last_line", None),
        ("<answer>6</answer> no <answer>\n7 </answer> bye", "answer_tag", "7"),
        ("<answer>7", "answer_tag", None),
        ("7</answer>", "answer_tag", None),
        ("<answer> </answer>", "answer_tag", None),
        ("in all $1,200.50 today", "last_number", "1200.50"),
        ("\u22124", "last_number", "-4"),
        ("none", "last_number", None),
    ],
)
def test_the_part_that_is_the_answer(text: str, extract: str, answer: str | None) -> None:
    assert answer_part(text, extract) == answer


def test_after_cuts_first(rule: ReasoningGym) -> None:
    entry = {"question": "6 + 6", "answer": "12", "metadata": {"source_dataset": "chain_sum"}}
    assert rule(item("<think>1</think>12", {"entry": entry}), after="</think>") == 1.0
    assert rule(item("12", {"entry": entry}), after="</think>") == 0.0


def test_an_answer_that_is_evaluated_cannot_write_files(rule: ReasoningGym, tmp_path: Path) -> None:
    entry = row("binary_matrix")  # its checker evaluates an answer that is no matrix
    target = tmp_path / "written"
    assert rule(item(f"[[open({str(target)!r}, 'w')]]", {"entry": entry})) < 0.5
    assert rule(item(f"[[__import__('os').mkdir({str(target)!r})]]", {"entry": entry})) < 0.5
    assert not target.exists()
    assert rule(item(entry["answer"], {"entry": entry})) == 1.0
