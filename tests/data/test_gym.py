"""Procedural tasks as rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rftcli.data import gym
from rftcli.data.rows import fingerprint, read_rows
from rftcli.data.spec import DataSpec
from rftcli.errors import UsageError


def spec(**options: object) -> DataSpec:
    return DataSpec(name="legs", python="rftcli.data.gym:rows", options={"task": "leg_counting", "size": 4, "seed": 1, **options}, label="gym")


def test_rows_are_the_same_every_time() -> None:
    rows = read_rows(spec())
    assert len(rows) == 4
    assert fingerprint(rows) == fingerprint(read_rows(spec()))
    assert fingerprint(rows) != fingerprint(read_rows(spec(seed=2)))
    assert rows[0].prompt == rows[0].columns["entry"]["question"]
    assert rows[0].reference == rows[0].columns["entry"]["answer"] == "222"
    assert rows[0].columns["entry"]["metadata"]["total_legs"] == 222


def test_template_chat_and_settings_of_the_task() -> None:
    (row,) = read_rows(spec(size=1, template="Think. {question} Now.", chat=True, min_animals=2, max_animals=2))
    question = row.columns["entry"]["question"]
    assert row.prompt == ({"role": "user", "content": f"Think. {question} Now."},)
    assert len(row.columns["entry"]["metadata"]["animals"]) == 2


SUMS = {"task": "chain_sum", "min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}


def questions(**options: object) -> list[str]:
    return [str(row["prompt"]) for row in gym.rows(**{**SUMS, **options})]  # type: ignore[arg-type]


def test_neighbouring_seeds_are_other_rows() -> None:
    """The package makes row i from seed + i."""
    legs = {seed: [row["prompt"] for row in gym.rows("leg_counting", 50, seed)] for seed in range(4)}
    assert all(not set(legs[seed]) & set(legs[other]) for seed in range(4) for other in range(seed))


def test_no_question_of_another_set() -> None:
    train = questions(size=2000, seed=1)
    assert set(train) & set(questions(size=200, seed=2))  # a small task: by chance
    held_out = questions(size=200, seed=2, without={"seed": 1, "size": 2000})
    assert len(held_out) == 200 and not set(train) & set(held_out)
    assert held_out[:50] == questions(size=50, seed=2, without={"seed": 1, "size": 2000})
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(UsageError, match=r"task `chain_sum` has \d+ questions that are not in the other set, of 30"):
        questions(size=30, seed=2, without={"seed": 1, "size": 3000}, **few)
    with pytest.raises(UsageError, match="needs the keys seed and size"):
        questions(size=3, seed=2, without={"seed": 1})


def test_the_shipped_recipe_holds_its_evaluation_out() -> None:
    from rftcli.plan.specs import data_specs
    from rftcli.recipe.load import load_recipe
    from rftcli.runtime.prepare import recipe_path

    (train,), (held_out,) = data_specs(load_recipe(recipe_path(Path("smollm2-chain-sum"))).recipe)
    trained, unseen = ({str(row["prompt"]) for row in gym.rows(**spec.options)} for spec in (train, held_out))
    assert len(trained) > 1000 and len(unseen) > 50 and not trained & unseen


def test_a_task_without_a_single_answer_has_no_reference() -> None:
    (row,) = read_rows(spec(task="graph_color", size=1))
    assert row.reference is None
    assert len(fingerprint([row])) == 64


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"task": "leg_countin"}, "reasoning-gym refuses task `leg_countin`: "),
        ({"bogus": 1}, "reasoning-gym refuses task `leg_counting`: .*bogus"),
        ({"min_animals": 0}, "reasoning-gym refuses task `leg_counting`: "),
        ({"template": "no slot"}, "the template has no {question}"),
    ],
)
def test_refusals(options: dict, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_rows(spec(**options))


def test_without_the_package_the_error_has_the_command() -> None:
    program = (
        "import sys, json; sys.modules['reasoning_gym'] = None\n"
        "from rftcli.data import gym; from rftcli.errors import MachineError\n"
        "try: next(gym.rows('leg_counting', 1, 1))\n"
        "except MachineError as error: print(json.dumps([error.message, error.hint, error.exit_code]))\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown) == ["tasks of reasoning-gym need the package `reasoning_gym`", "pip install 'rftcli[gym]'", 3]


def test_the_room_imports_nothing_heavy() -> None:
    assert gym.SLOT == "{question}"
    program = (
        "import sys\n"
        "import rftcli.data.prompts, rftcli.data.source, rftcli.data.gym, rftcli.probe.data\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'vllm', 'numpy', 'reasoning_gym', 'pydantic', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
