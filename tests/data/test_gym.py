"""Procedural tasks as rows."""

from __future__ import annotations

import json
import subprocess
import sys

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
    assert rows[0].reference == rows[0].columns["entry"]["answer"] == "292"
    assert rows[0].columns["entry"]["metadata"]["total_legs"] == 292


def test_template_chat_and_settings_of_the_task() -> None:
    (row,) = read_rows(spec(size=1, template="Think. {question} Now.", chat=True, min_animals=2, max_animals=2))
    question = row.columns["entry"]["question"]
    assert row.prompt == ({"role": "user", "content": f"Think. {question} Now."},)
    assert len(row.columns["entry"]["metadata"]["animals"]) == 2


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
