"""Every shipped recipe's rewards on rows of the form its data has: the rows' own references get full marks, an answer in the form that a recipe asks
for as well, and a wrong one gets less. Models are replaced by services; nothing is downloaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_services import Asked, FakeService, chat_reply

from rftcli.cli.main import main
from rftcli.errors import EXIT_OK

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SERVED = 9.0
"""What the reward model that stands in for a classifier says of every answer; recipes bound it at 5."""


def answer(asked: Asked, number: int) -> Any:
    """A reward model, and a judge that finds answers good where they say so."""
    if asked.path == "/score":
        return {"rewards": [SERVED] * len(asked.body["query"])}
    share = 0.9 if "a good answer" in asked.body["messages"][0]["content"] else 0.2
    return chat_reply("yes", top={"yes": math.log(share), "no": math.log(1 - share)})


@pytest.fixture(scope="module")
def server() -> Iterator[FakeService]:
    with FakeService(answer) as service:
        yield service


@dataclass(frozen=True, kw_only=True)
class Case:
    rows: tuple[dict[str, Any], ...]
    sets: tuple[str, ...]
    """`{rows}`: the file of the rows, `{url}`: the services."""
    completions: tuple[tuple[str, str, float], ...]
    """(id of the row, what a model says, its reward). A held-out row's id has its set in front, `set/id`."""
    full: tuple[str, ...]
    """Parts that give the rows' own references full marks."""
    held_out: tuple[dict[str, Any], ...] = ()


LOCAL = ("data.train[0].path={rows}", "data.train[0].split=null")
HELPFUL = "{{kind: http, path: null, urls: ['{url}/score']}}"
THOUGHT = "<think>Let me see.</think>\n"
CASES: dict[str, Case] = {
    "gsm8k": Case(
        rows=(
            {"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
            {"question": "How many metres are 1.2 km?", "answer": "1.2 x 1000 = 1200\n#### 1,200"},
        ),
        sets=(*LOCAL, "data.train[0].options=null", "data.eval.gsm8k.path={held_out}", "data.eval.gsm8k.split=null", "data.eval.gsm8k.options=null"),
        held_out=({"question": "2 + 2?", "answer": "#### 4"},),
        completions=(
            ("gsm8k:0", THOUGHT + r"She has \boxed{7}.", 1.0), ("gsm8k:0", r"She has \boxed{7}.", 0.9), ("gsm8k:0", THOUGHT + r"\boxed{8}", 0.1),
            ("gsm8k:1", THOUGHT + r"\boxed{1200}", 1.0), ("gsm8k:1", "I do not know.", 0.0),
            ("gsm8k/gsm8k:0", r"\boxed{4}", 0.9),
        ),
        full=("math_answer",),
    ),
    "dapo-math": Case(
        rows=(
            {"prompt": [{"role": "user", "content": "Solve x - 34 = 0."}], "reward_model": {"ground_truth": "34", "style": "rule"}, "ability": "M"},
            {"prompt": [{"role": "user", "content": "What is -3/4?"}], "reward_model": {"ground_truth": "-3/4", "style": "rule"}, "ability": "M"},
        ),
        sets=(*LOCAL, "data.eval.aime_2024.path={held_out}", "data.eval.aime_2024.split=null"),
        held_out=({"problem": "Find the sum.", "answer": "204"},),
        completions=(
            ("dapo:0", "x is 34, so\nAnswer: 34", 1.0), ("dapo:0", r"\boxed{34}", 1.0), ("dapo:0", "Answer: 35", 0.0),
            ("dapo:1", r"Answer: $-\frac{3}{4}$", 1.0), ("dapo:1", "Answer: 3/4", 0.0), ("aime_2024/aime_2024:0", r"\boxed{204}", 1.0),
        ),
        full=("math_answer",),
    ),
    "reward-mix": Case(
        rows=({"prompt": "What is 2 + 3?", "answer": "5"}, {"prompt": "What is 1/2 + 1/4?", "answer": r"\frac{3}{4}"}),
        sets=("data.train.path={rows}", f"models.scorers.helpful={HELPFUL}"),
        completions=(("train:0", THOUGHT + r"\boxed{5}", 1.8), ("train:0", "6", 1.0), ("train:1", r"\boxed{0.75}", 1.7)),
        full=("math_answer",),
    ),
    "judge-table": Case(
        rows=tuple({"prompt": f"A question of {label}.", "label": label} for label in ("safety", "knowledge", "value", "normal", "other")),
        sets=(
            "data.train.path={rows}", f"models.scorers.general={HELPFUL}",
            *(f"models.scorers.{name}.placement.server={{url}}/v1" for name in ("safety", "knowledge", "value")),
        ),
        completions=(
            ("train:0", "a good answer", 0.9), ("train:0", "no answer", 0.2), ("train:1", "a good answer", 0.8 * 0.9 + 0.2 * 5),
            ("train:2", "a good answer", 0.9), ("train:3", "whatever", 5.0), ("train:4", "a good answer", 0.5 * 5 + 0.5 * 0.9),
        ),
        full=(),
    ),
    "preference-labels": Case(
        rows=tuple({"question": "Why?", "first": "So.", "second": "Because.", "better": letter} for letter in "ABC"),
        sets=("data.train.path={rows}",),
        completions=(
            ("train:0", THOUGHT + "<answer>A</answer>", 1.0), ("train:0", THOUGHT + "<answer>B</answer>", 0.1),
            ("train:1", "<answer>B</answer>", 0.9),
            ("train:2", THOUGHT + "<answer>C</answer>", 1.0), ("train:2", "I like both.", 0.0),
        ),
        full=("choice",),
    ),
    "quickstart": Case(
        rows=({"prompt": "Q: 12+34\nA:", "answer": "46"},), sets=("data.train.path={rows}",),
        completions=(("train:0", " 12+34=46 #### 46", 1.0), ("train:0", " 46", 0.0)), full=(),
    ),
}  # fmt: skip
APART = {"smollm2-chain-sum": "its rows are made by the package that scores them: tests/rewards/test_gym.py"}


def test_every_shipped_recipe_is_here() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(CASES) | set(APART)


def tried(name: str, server: FakeService, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any]:
    case = CASES[name]
    for file, rows in (("rows", case.rows), ("held_out", case.held_out)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {"rows": folder / "rows.jsonl", "held_out": folder / "held_out.jsonl", "url": server.url}
    sets = [word for text in case.sets for word in ("--set", text.format(**places))]
    with pytest.raises(SystemExit) as caught:
        main(["rewards", "try", name, "--json", *sets, *more])
    said = capsys.readouterr()
    assert said.out, said.err
    return int(str(caught.value.code)), json.loads(said.out)


@pytest.mark.parametrize("name", CASES)
def test_its_own_references_are_read(name: str, server: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = tried(name, server, tmp_path, capsys)
    parts = {part["name"]: part for part in found["parts"]}
    assert code == EXIT_OK and len(found["samples"]) == len(CASES[name].rows)
    assert not any(part["errors"] or part["abstained"] for part in parts.values())
    for part in CASES[name].full:
        assert (parts[part]["least"], parts[part]["scored"]) == (1.0, len(CASES[name].rows))


@pytest.mark.parametrize("name", CASES)
def test_answers_in_the_form_that_it_asks_for(name: str, server: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, file = CASES[name], tmp_path / "completions.jsonl"
    lines = [{"prompt_id": row.rpartition("/")[2], "set": row.rpartition("/")[0] or None, "completion": text} for row, text, _ in case.completions]
    file.write_text("".join(json.dumps({key: value for key, value in line.items() if value}) + "\n" for line in lines))
    code, found = tried(name, server, tmp_path, capsys, "--completions", str(file))
    assert code == EXIT_OK
    assert [sample["reward"] for sample in found["samples"]] == pytest.approx([reward for _, _, reward in case.completions])
