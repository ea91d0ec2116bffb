"""`rft rewards try`: references, given completions and a run's samples, scored without a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_services import Asked, FakeService

from rftcli.cli.main import main
from rftcli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE

RECIPE = """\
models: {policy: {path: no/such-model, chat: {prefill: <think>}}}
data: {train: {path: rows.jsonl}}
rewards:
  default:
    parts:
      - {rule: math_answer}
      - {rule: think_format, weight: 0.1}
      - {python: 'mine_for_tests:f', weight: 0.0, name: own}
train: {steps: 2}
"""
MODULE = """\
def f(completion, columns, log_extra):
    log_extra("level", columns.get("level"))
    if columns.get("level") == 9: raise RuntimeError("too hard")
    return len(completion)
def whole(scores): return [0.5] * len(scores)
def broken(scores): raise RuntimeError("no idea")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    Path("r.yaml").write_text(RECIPE)
    Path("mine_for_tests.py").write_text(MODULE)
    rows = [{"prompt": "1+1=", "answer": "2", "level": 1}, {"prompt": "1+2=", "answer": "3", "level": 9}, {"prompt": "?", "answer": r"\frac{1}{2}"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rft(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["rewards", "try", "r.yaml", *arguments])
    return int(str(caught.value.code))


def tried(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = rft("--json", *arguments)
    return code, json.loads(capsys.readouterr().out)


def write(*lines: dict[str, Any]) -> None:
    Path("c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_rows_own_references(capsys: pytest.CaptureFixture[str]) -> None:
    assert rft() == EXIT_FAILED  # a part failed
    shown = capsys.readouterr().out
    assert "3 completions: the rows' own references as answers" in shown and "own: 1 x mine_for_tests:f: RuntimeError: too hard" in shown
    assert [line.split()[:5] for line in shown.splitlines() if line.startswith(("math_answer", "own"))] == [
        ["math_answer", "1", "3", "0", "0"],
        ["own", "0", "2", "0", "1"],
    ]
    assert rft("--rows", "1") == EXIT_OK
    assert "1 completions" in capsys.readouterr().out


def test_a_form_that_references_lack_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Zeros that only mean that nobody wrote the answer as the rule reads it."""
    Path("r.yaml").write_text(RECIPE.replace("{rule: math_answer}", "{rule: exact, name: answer, options: {after: '####'}}"))
    _, found = tried(capsys, "--rows", "1")
    (note,) = found["notes"]
    assert note.startswith("answer: a reference as it stands scores 0, and written as '####2' it has full marks (") and "--completions" in note
    assert rft("--rows", "1") == EXIT_OK and note in capsys.readouterr().out
    two = RECIPE.replace("  default:", "  hard:\n    parts: [{rule: exact, name: answer, options: {after: 'A:'}}]\n  default:")
    two = two.replace("{path: rows.jsonl}", "{path: rows.jsonl, columns: {label: label}}")
    Path("r.yaml").write_text(two.replace("{rule: math_answer}", "{rule: exact, name: answer, options: {after: '####'}}"))
    labelled = [{"prompt": f"1+{row}=", "answer": str(1 + row), "label": "hard" if row > 2 else "default"} for row in range(1, 5)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    names = [note.split(":")[0] for note in tried(capsys)[1]["notes"]]
    assert names == ["default.answer", "hard.answer"]
    write({"prompt": "1+1=", "completion": "3", "reference": "2"})
    assert tried(capsys, "--completions", "c.jsonl")[1]["notes"] == []
    Path("r.yaml").write_text(RECIPE)
    assert tried(capsys, "--rows", "1")[1]["notes"] == []  # `math_answer` reads a bare number


def test_a_line_of_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    write({"completion": "2", "prompt_id": "train-0"})
    assert rft("--completions", "c.jsonl") == EXIT_USAGE
    assert "c.jsonl:1: no row has the prompt_id `train-0`" in (said := capsys.readouterr().err) and "`train:0`" in said


def test_recorded_completions_get_what_they_lack_from_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        {"completion": "hm</think>2<e>", "special_end": "<e>", "prompt_id": "train:0", "draw": 4, "sample": 1, "tokens": 7, "reward": 1.1},
        {"completion": "5", "reference": 5, "reward": 0.5},
    )
    code, found = tried(capsys, "--completions", "c.jsonl")
    first, second = found["samples"]
    assert (code, found["changed"]) == (EXIT_OK, 1)
    assert (first["reward"], first["draw"], first["sample"], first["tokens"]) == (1.1, 4, 1, 7)
    assert (first["extra"], first["reference"]) == ({"level": 1}, "2")
    assert first["parts"]["own"]["value"] == len("<think>hm</think>2")  # the prefill in front, the special token gone
    assert second["reward"] == 1.0 and second["parts"]["think_format"]["value"] == 0.0
    assert [part["name"] for part in found["parts"]] == ["math_answer", "think_format", "own"]
    assert tried(capsys, "--completions", "c.jsonl", "--rows", "1")[1]["samples"] == [first]


def test_what_functions_print_is_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("loud_for_tests.py").write_text("print('hello')\ndef f(completion):\n    print('noise')\n    return 1.0\n")
    code, found = tried(capsys, "--set", "rewards.default.parts=[{python: 'loud_for_tests:f'}]")
    assert code == EXIT_OK and len(found["samples"]) == 3


def test_what_functions_log_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("logs_for_tests.py").write_text("def f(completion, log_metric):\n    log_metric('letters', len(completion))\n    return 1.0\n")
    write({"completion": "abc"}, {"completion": "a"})
    arguments = ("--completions", "c.jsonl", "--set", "rewards.default.parts=[{python: 'logs_for_tests:f'}]")
    assert tried(capsys, *arguments)[1]["logged"] == {"letters": 9.0}  # the prefill is scored too
    assert rft(*arguments) == EXIT_OK and "logged, means: letters 9.00" in capsys.readouterr().out


def test_a_combining_function(capsys: pytest.CaptureFixture[str]) -> None:
    write({"completion": "5", "reference": 5}, {"completion": "6", "reference": 5})
    code, found = tried(capsys, "--completions", "c.jsonl", "--set", "rewards.default.combine={python: mine_for_tests:whole}")
    assert code == EXIT_OK and [sample["reward"] for sample in found["samples"]] == [0.5, 0.5]
    assert rft("--completions", "c.jsonl", "--set", "rewards.default.combine={python: mine_for_tests:broken}") == EXIT_FAILED
    shown = capsys.readouterr().out
    assert "combine: 2 x mine_for_tests:broken: RuntimeError: no idea" in shown and "(first at c.jsonl:1)" in shown


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "c.jsonl holds no completion"),
        ("{}\n", "c.jsonl:1: no text `completion`"),
        ('{"completion": "a"}\n\nnot json\n', "c.jsonl:3: not JSON"),
        ('{"completion": 5}\n', "c.jsonl:1: `completion` must be text, got 5"),
        ('{"completion": "a"}\n{"completion": "a", "label": ["math"]}\n', "c.jsonl:2: `label` must be text"),
        ('{"completion": "a", "columns": [1]}\n', "c.jsonl:1: `columns` must be an object"),
        ('{"completion": "a", "tokens": "7"}\n', "c.jsonl:1: `tokens` must be a whole number"),
        ('{"completion": "a", "tokens": -7}\n', "c.jsonl:1: `tokens` must be at least 0, got -7"),
        ('{"completion": "a", "draw": true}\n', "c.jsonl:1: `draw` must be a whole number"),
        ('\n{"completion": "a", "finish": "eos"}\n', 'c.jsonl:2: `finish` is "eos"'),
    ],
)
def test_files_without_completions(lines: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.jsonl").write_text(lines)
    assert rft("--completions", "c.jsonl") == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert rft("--completions", "nowhere.jsonl") == EXIT_USAGE


def test_a_file_that_begins_with_a_byte_order_mark(capsys: pytest.CaptureFixture[str]) -> None:
    """As data files may."""
    Path("c.jsonl").write_text('\ufeff{"completion": "5", "reference": 5}\n')
    code, found = tried(capsys, "--completions", "c.jsonl")
    assert code == EXIT_OK and len(found["samples"]) == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rewards.default.combine={python: mine_for_tests:wholes}", "has no `wholes`"),
        ("rewards.default.parts[0].options={reed: [boxed]}", "`math_answer` has no option `reed`"),
    ],
)
def test_a_recipe_with_a_fault(setting: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rft("--set", setting) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_only_try_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["rewards", "list", "r.yaml"])
    assert caught.value.code == EXIT_USAGE and "rft rewards try RECIPE" in capsys.readouterr().err


def test_a_label_without_rewards_names_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("--set", "rewards.math=[{rule: exact}]", "--set", "rewards.default=null", "--set", "data.train[0].label=math", "--completions", "c.jsonl")
    write({"completion": "5", "reference": 5, "label": "math"}, {"completion": "6", "reference": 5, "label": "maths"})
    assert rft(*sets) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert "c.jsonl:2: there are no rewards for the label `maths`" in shown and "did you mean `math`?" in shown
    write({"completion": "5", "reference": 5})
    assert rft(*sets) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert "c.jsonl:1: there are no rewards for the label `default`" in shown and "the line has no `label`" in shown


def test_an_error_says_where_it_was_met_first(capsys: pytest.CaptureFixture[str]) -> None:
    write({"completion": "1", "columns": {"level": 1}, "reference": 1}, *[{"completion": "1", "columns": {"level": 9}, "reference": 1}] * 2)
    assert rft("--completions", "c.jsonl") == EXIT_FAILED
    assert "own: 2 x mine_for_tests:f: RuntimeError: too hard (mine_for_tests.py:3) (first at c.jsonl:2)" in capsys.readouterr().out


def test_rewards_are_combined_and_shaped(capsys: pytest.CaptureFixture[str]) -> None:
    """1.0 + 0.1 for both; the second is cut at 8 of 8 tokens (overlong -1), and did not end (-0.25)."""
    sets = [
        "rewards.default.parts=[{rule: math_answer}, {rule: regex, weight: 0.1, options: {pattern: '5'}}]", "rollout.max_new_tokens=8",
        "reward_shaping={overlong: {buffer: 4}, missing_eos_penalty: 0.25, clip: [-0.1, 5], running_norm: scale}",
    ]  # fmt: skip
    line = {"completion": "5", "reference": 5}
    write({**line, "tokens": 2, "reward": 1.1}, {**line, "tokens": 8, "finish": "length", "reward": -0.1, "combined": 1.1})
    arguments = ("--completions", "c.jsonl", *(word for text in sets for word in ("--set", text)))
    code, found = tried(capsys, *arguments)
    assert (code, found["changed"]) == (EXIT_OK, 0)
    assert [(sample["combined"], sample["reward"]) for sample in found["samples"]] == [(1.1, 1.1), (1.1, -0.1)]
    assert (found["rewards"][0]["mean"], found["rewards"][0]["scored"]) == (0.5, 2)
    assert found["notes"] == ["reward_shaping.running_norm is left out: it depends on all rewards before"]
    assert rft(*arguments) == EXIT_OK
    shown = capsys.readouterr().out
    assert "combined" in shown and "reward, shaped" in shown and "running_norm is left out" in shown
    masked = (*arguments, "--set", "reward_shaping.truncated=mask", "--set", "reward_shaping.missing_eos_penalty=null")
    code, found = tried(capsys, *masked)
    assert [sample["reward"] for sample in found["samples"]] == [1.1, None] and found["samples"][1]["masked"]
    rft(*masked)
    assert "masked" in capsys.readouterr().out


def test_an_overlong_penalty_without_a_length_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = tried(capsys, "--rows", "1", "--set", "rollout.max_new_tokens=auto", "--set", "reward_shaping.overlong={buffer: 4}")
    assert code == EXIT_OK and "reward_shaping.overlong is left out" in found["notes"][0]


def test_models_are_left_out_when_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A reward service answers as in a run; a reward with a part that is left out is no number, and no failure."""

    def lengths(asked: Asked, number: int) -> Any:
        return {"rewards": [float(len(text)) for text in asked.body["query"]]}

    with FakeService(lengths) as service:
        sets = [
            f"models.scorers={{service: {{kind: http, urls: ['{service.url}/score']}}, large: {{kind: classifier, path: no/model}}}}",
            "rewards={default: [{model: service}, {model: large, weight: 0.5, on_error: stop}], plain: [{model: service}]}",
        ]
        write({"completion": "abc", "reward": 2.0}, {"completion": "abc", "label": "plain", "reward": 10.0})
        arguments = ("--no-models", "--completions", "c.jsonl", *(word for text in sets for word in ("--set", text)))
        code, found = tried(capsys, *arguments)
        assert rft(*arguments) == EXIT_OK
    assert code == EXIT_OK and (found["left_out"], found["changed"]) == (["large"], 0)
    parts = {(part["label"], part["name"]): part for part in found["parts"]}
    assert parts["default", "service"]["scored"] == 1 and parts["default", "service"]["mean"] > 0
    large = parts["default", "large"]
    assert (large["scored"], large["abstained"], large["errors"], large["left_out"]) == (0, 0, {}, True)
    assert [sample["reward"] for sample in found["samples"]] == [None, parts["plain", "service"]["mean"]]
    shown = capsys.readouterr().out
    assert "without large" in shown and "large left out" in shown and "without --no-models their models are loaded" in shown


def test_a_held_out_completion_finds_the_row_of_its_own_set(capsys: pytest.CaptureFixture[str]) -> None:
    """Training and evaluation may have sets of one name, whose rows have the same ids; `@ema` marks a set under the running mean of the weights."""
    Path("held_out.jsonl").write_text('{"prompt": "4+4=", "answer": "8", "level": 5}\n')
    write(*({"completion": "8", "prompt_id": "train:0"} | more for more in ({}, {"set": "train"}, {"set": "train@ema"})))
    code, found = tried(capsys, "--completions", "c.jsonl", "--set", "data.eval={train: {path: held_out.jsonl}}")
    assert code == EXIT_OK
    said = [(line["reference"], line["extra"]["level"], line["parts"]["math_answer"]["value"]) for line in found["samples"]]
    assert said == [("2", 1, 0.0), ("8", 5, 1.0), ("8", 5, 1.0)]


def test_one_ctrl_c_ends_it_whatever_a_function_does(tmp_path: Path) -> None:
    Path("mine_for_tests.py").write_text("import pathlib, time\ndef f(completion):\n    pathlib.Path('called').touch()\n    time.sleep(3600)\n")
    command = [sys.executable, "-m", "rftcli", "rewards", "try", "r.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    took = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    try:
        deadline = time.monotonic() + 120
        while not Path("called").exists():
            assert took.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        took.send_signal(signal.SIGINT)
        _, said = took.communicate(timeout=60)
    finally:
        took.kill()
    assert took.returncode == EXIT_INTERRUPTED and said.splitlines()[-1] == "interrupted" and "Traceback" not in said


def heard() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
