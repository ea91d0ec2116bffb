"""What is found in the rows before a run starts: lengths, the data's own reference answers, training rows in the evaluation."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - with it here, prompts are measured in this process, not in one of their own

from rftcli.codec import to_data
from rftcli.errors import MachineError, RecipeError
from rftcli.probe.lengths import lengths_text
from rftcli.recipe.problems import Problem
from rftcli.runtime import prepare
from rftcli.runtime.measure import Measured, Trouble
from rftcli.runtime.prepare import Prepared

RECIPE = """\
models:
  policy: {path: 'builtin:quickstart'}
data:
  train: {path: rows.jsonl}
rollout: {max_prompt_tokens: 8, max_new_tokens: 24}
rewards:
  default: [{rule: exact}]
batch: {prompts_per_step: 4}
train: {data_passes: 2}
"""
LONG = "123+456+789="


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "r.yaml").write_text(RECIPE)


def rows(*found: dict[str, Any], name: str = "rows.jsonl", settled: bool = False) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in found))
    if settled:
        os.utime(name, (1_000_000_000, 1_000_000_000))


def row(prompt: str, answer: Any = "5", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answer": answer, **more}


def planned(*sets: str) -> Prepared:
    return prepare.prepare(Path("r.yaml"), sets, ranks=1, gpus=None)


def problem(*sets: str, find: Callable[..., Any] = planned) -> Problem:
    with pytest.raises(RecipeError) as caught:
        find(*sets)
    (found,) = caught.value.problems
    assert isinstance(found, Problem)
    return found


SHORT = [row(f"{n}+1=", str(n + 1)) for n in range(6)]


def test_a_long_prompt_is_refused_before_anything_starts() -> None:
    rows(*SHORT, row(LONG), row("1+1="), row(LONG + LONG))
    found = problem()
    assert found.path == "data.train[0].path" and found.place is not None and found.place.line == 4
    assert f"rows.jsonl:7: the prompt needs {1 + len(LONG)} tokens, `rollout.max_prompt_tokens` allows 8" in found.message
    assert f"(2 of 9 rows are too long, the longest needs {1 + 2 * len(LONG)} tokens)" in found.message
    assert "data.overlong_prompt" in str(found.hint)


def test_of_an_evaluation_set_too() -> None:
    rows(*SHORT)
    rows(row(LONG), name="test.jsonl")
    assert problem("data.eval.t.path=test.jsonl").path == "data.eval.t.path"


@pytest.mark.parametrize(
    ("policy", "steps", "done"), [("drop", 3, "dropped"), ("cut_left", 4, "cut on the left"), ("cut_right", 4, "cut on the right")]
)
def test_drops_and_cuts_are_counted(policy: str, steps: int, done: str) -> None:
    """Two passes of 6 or 8 rows, 4 a step: passes count what is left after the drop."""
    rows(*SHORT, row(LONG), row(LONG))
    found = planned(f"data.overlong_prompt={policy}")
    assert found.plan.steps == steps
    assert found.warnings == (f"data set `train`: 2 of the 8 prompts are longer than 8 tokens and are {done}",)
    (facts,) = found.lengths
    assert (facts.rows, facts.overlong, facts.kept) == (8, 2, 6 if policy == "drop" else 8)


def test_nothing_is_left() -> None:
    rows(row(LONG), row(LONG))
    found = problem("data.overlong_prompt=drop")
    assert found.message == "data set `train`: nothing is left to draw: all 2 prompts need more than 8 tokens"


def test_a_prompt_that_cannot_be_cut() -> None:
    rows(*SHORT, row("1+1="))
    assert "leaves nothing of the prompt" in problem("data.overlong_prompt=cut_left", "models.policy.chat.prefill='1+2+3+4+5='").message


def test_chat_settings_that_do_not_work_are_found_here() -> None:
    rows(*SHORT)
    found = problem("models.policy.chat.options={enable_thinkin: false}")
    assert found.path == "models.policy.chat" and "never reads `enable_thinkin`" in found.message


def test_the_table_for_a_person() -> None:
    rows(*[row("11=")] * 7, *[row("12+34=")] * 2, row(LONG))
    rows(row("1="), name="test.jsonl")
    found = planned("data.overlong_prompt=drop", "data.eval.t.path=test.jsonl")
    assert lengths_text(found.lengths).splitlines() == [
        "prompt tokens  rows  min  median  p90  p99  max  too long",
        "train            10    4       4    7   13   13  1 (drop)",
        "t                 1    3       3    3    3    3         0",
        "train:",
        "   1-4  7  ##############################",
        "   5-8  2  ########",
        "  9-16  1  ####",
        "t:",
        "  1-4  1  ##############################",
    ]


def test_lengths_are_measured_once() -> None:
    """The second plan takes them from the cache; another limit, template or file does not."""
    rows(*SHORT, settled=True)
    assert planned().lengths[0].longest == 5
    cache = Path("cache/rft/data")
    before = {path: path.read_text() for path in cache.iterdir()}
    (entry,) = [path for path, text in before.items() if '"troubles"' in text]
    entry.write_text(before[entry].replace('"longest": 5', '"longest": 55'))
    assert planned().lengths[0].longest == 55
    assert planned("rollout.max_prompt_tokens=9").lengths[0].longest == 5
    assert planned("data.train.template='{}1'").lengths[0].longest == 6
    rows(*SHORT, row("12345="), settled=True)
    assert planned().lengths[0].longest == 7


def test_rows_of_a_function_are_measured_once() -> None:
    """Their own content says whether they have changed, not the function."""
    source = Path("made.py")
    source.write_text("from pathlib import Path\n\ndef rows():\n    return [{'prompt': Path('word').read_text() + '=', 'answer': '5'}] * 4\n")
    Path("word").write_text("12+34")
    made = ("data.train.path=null", "data.train.python=made:rows")
    assert planned(*made).lengths[0].longest == 7
    (entry,) = [path for path in Path("cache/rft/data").iterdir() if '"troubles"' in path.read_text()]
    entry.write_text(entry.read_text().replace('"longest": 7', '"longest": 77'))
    assert planned(*made).lengths[0].longest == 77
    Path("word").write_text("1+3")
    assert planned(*made).lengths[0].longest == 5


@pytest.mark.parametrize("name", ["transformers", "tokenizers"])
def test_another_version_of_a_package_measures_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(*SHORT, settled=True)
    planned()
    (entry,) = [path for path in Path("cache/rft/data").iterdir() if '"troubles"' in path.read_text()]
    entry.write_text(entry.read_text().replace('"longest": 5', '"longest": 55'))
    Path(f"site/{name}-0.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["site", *sys.path])
    assert planned().lengths[0].longest == 5


def test_what_could_not_be_measured_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was missing may be there the next time."""
    rows(*SHORT, settled=True)
    trouble = Trouble(name=None, message="a tokenizer needs a package", hint=None, machine=True)
    with monkeypatch.context() as missing, pytest.raises(MachineError, match="needs a package"):
        missing.setattr("rftcli.runtime.measure.measure", lambda *_: Measured(train=(), eval=(), troubles=(trouble,)))
        planned()
    assert planned().lengths[0].longest == 5


def test_a_streamed_set_is_measured_at_its_beginning() -> None:
    rows(*SHORT, row(LONG))
    (facts,) = planned("data.train.streaming=true", "train.data_passes=null", "train.steps=3", "data.overlong_prompt=drop").lengths
    assert facts.rows == 7 and facts.complete


MATH = "rewards.default=[{rule: math_answer}, {rule: think_format}]"


@pytest.mark.parametrize(
    ("reward", "answer", "why"),
    [
        ("rewards.default=[{rule: exact, options: {after: '####'}}]", "the #### 4", "scores 0"),
        ("rewards.default=[{rule: f1, options: {after: '####'}}]", "so #### 4", "scores 0.666667"),
    ],
)
def test_references_without_full_marks(reward: str, answer: Any, why: str) -> None:
    rows(*SHORT, row("1=", answer), row("2=", answer))
    (warning,) = planned(reward).warnings
    assert warning.startswith("data set `train`: 2 of 8 reference answers do not get full marks from") and why in warning
    assert "rows.jsonl:7: " in warning and "rows.jsonl:8: " in warning
    found = problem(reward, "data.check_reference=refuse")
    assert found.path == "data.train[0].path" and "rows.jsonl:7: " in found.message and "data.check_reference: off" in str(found.hint)
    assert planned(reward, "data.check_reference=off").warnings == ()


NO_TESTS = "the row has no tests"


@pytest.mark.parametrize(
    ("reward", "answer", "why"),
    [
        (MATH, r"\frac{1}{", "cannot be read: its braces do not balance"),
        (MATH, "...", "holds nothing to compare with"),
        (MATH, {"value": 3}, "a reference answer must be text or a number, got dict"),
        (MATH, r"x_{1}}{y = \foo 3 + {", "cannot be read"),
        (MATH, r"\frac{}{}", "cannot be read as mathematics"),
        ("rewards.default=[{rule: exact}]", ["4", {"a": 1}], "a reference answer must be text or a number, got dict"),
        ("rewards.default=[{rule: f1}]", [], "the list of reference answers is empty"),
        ("rewards.default=[{rule: regex, options: {pattern: '(a)', group: 1}}]", {"a": 1}, "must be text or a number, got dict"),
        ("rewards.default=[{rule: choice, options: {choices: ABCDEFGHIJKLMN}}]", "4", "is no choice of A, B, C"),
        ("rewards.default=[{rule: json_schema}]", '{"type": "obj"}', "no JSON schema: 'obj' is not valid"),
        ("rewards.default=[{rule: code_tests}]", [3], "a test is text or a mapping with input and output, got 3"),
        ("rewards.default=[{rule: code_tests, options: {tests: checks}}]", "4", NO_TESTS),
        ("rewards.default=[{rule: instructions}]", "4", "has no columns `instruction_id_list` and `kwargs`"),
        ("rewards.default=[{rule: cosine_length, options: {max_tokens: 9}}]", r"\frac{1}{", "its braces do not balance"),
    ],
)
def test_a_row_that_its_rule_cannot_read_stops_at_the_start(reward: str, answer: Any, why: str) -> None:
    """Whatever `check_reference` says but `off`: such a row could never be scored."""
    rows(row("1=", answer), row("2=", answer), name="rows.jsonl")
    for how in ("warn", "refuse"):
        found = problem(reward, f"data.check_reference={how}", "batch.prompts_per_step=1")
        assert found.path == "data.train[0].path" and "2 of 2 rows hold nothing that `" in found.message and why in found.message
        assert "rows.jsonl:1: " in found.message and "rows.jsonl:2: " in found.message
    assert planned(reward, "data.check_reference=off", "batch.prompts_per_step=1").warnings == ()


@pytest.mark.parametrize(
    ("reward", "answers"),
    [
        (
            MATH,
            ["36", r"\frac{1}{2}", "x^2+1", "so 72/2=36\n#### 36", r"it is \boxed{7}", 3.5, ["4", "four"], "Monday", "(1, 2)", r"\{1, 2\}", "$3,000"],
        ),
        ("rewards.default=[{rule: math_answer, options: {after: '</think>', read: [hashes]}}]", ["36", "0.5"]),
        ("rewards.default=[{rule: exact, options: {after: '####'}}]", ["36", "a b"]),
        ("rewards.default=[{rule: choice}]", ["B", "(c)", "D. Paris", ["A", "B"]]),
        ("rewards.default=[{rule: f1}]", ["the sun", ["a", "b"], 4]),
        ("rewards.default=[{rule: json_schema}]", ['{"type": "object"}', {"type": "array"}]),
        ("rewards.default=[{rule: code_tests}]", ["assert f(1) == 2", {"inputs": ["1"], "outputs": ["2"]}]),
        ("rewards.default=[{rule: think_format}, {rule: length, options: {target: 1, limit: 3}}]", ["anything", None, "..."]),
    ],
)
def test_references_with_full_marks(reward: str, answers: list[Any]) -> None:
    rows(*(row(f"{n}=", answer) for n, answer in enumerate(answers)))
    assert planned(reward, "data.check_reference=refuse", "batch.prompts_per_step=1").warnings == ()


def test_evaluation_sets_are_checked_and_labels_matter() -> None:
    rows(*SHORT)
    rows(row("a", "{", kind="math"), row("b", "{", kind="chat"), name="test.jsonl")
    found = problem(
        "data.eval.t={path: test.jsonl, columns: {label: kind}}", "data.check_reference=refuse",
        "rewards={default: [{rule: exact}], math: [{rule: math_answer}], chat: [{rule: exact}]}",
    )  # fmt: skip
    assert found.path == "data.eval.t.path" and "1 of 2 rows hold nothing" in found.message and "test.jsonl:1" in found.message


def test_a_large_set_is_looked_at_evenly_and_not_for_long() -> None:
    from rftcli.data.rows import read_rows
    from rftcli.data.spec import DataSpec
    from rftcli.rewards.spec import PartSpec
    from rftcli.runtime.references import MOST_ROWS, MOST_SECONDS, check_references

    rows(*(row(str(n), "a #### b" if n % 3 == 2 else "1") for n in range(3 * MOST_ROWS)))
    found = read_rows(DataSpec(name="s", path="rows.jsonl"))
    parts = {"default": [PartSpec(name="m", kind="rule", target="exact", options={"after": "####"})]}
    assert check_references({"s": found}, parts) == []  # every third row, none of them bad
    (finding,) = check_references({"s": found[2:]}, parts)
    assert (finding.failed, finding.checked, finding.rows) == (1000, 1000, 2998)
    ticks = iter([0.0, *(n * MOST_SECONDS / 10 for n in range(10**6))])
    (early,) = check_references({"s": found[2:]}, parts, clock=lambda: next(ticks))
    assert early.checked == 11


def test_training_rows_in_the_evaluation() -> None:
    rows(*SHORT, row("What  is\n1+1?"), row("what is 1+1?"))
    rows(row("5 + 5="), row("What is 1+1?"), row("0+1="), name="test.jsonl")
    sets = ("data.eval.t.path=test.jsonl", "rollout.max_prompt_tokens=20")
    expected = (
        "2 of 3 rows of the evaluation set `t` are trained on, by 3 of 8 rows of the training set `train` "
        f"(first: {Path.cwd()}/rows.jsonl:1 of it has the prompt of {Path.cwd()}/test.jsonl:3): its scores will say too much"
    )
    assert planned(*sets).warnings == (expected,)
    assert prepare.validate(Path("r.yaml"), sets, ranks=None, gpus=None).warnings == (expected,)


def test_a_message_and_a_text_are_the_same_question() -> None:
    rows(*SHORT, row([{"role": "system", "content": "Think."}, {"role": "user", "content": "5+5="}]))
    rows(row("5+5="), name="test.jsonl")
    checked = prepare.validate(Path("r.yaml"), ("data.eval.t.path=test.jsonl",), ranks=None, gpus=None)
    assert len(checked.warnings) == 1 and "1 of 1 rows of the evaluation set `t` are trained on, by 1 of 7" in checked.warnings[0]


def test_validation_checks_references_too() -> None:
    rows(*SHORT, row("1=", "{"))
    validated = lambda *sets: prepare.validate(Path("r.yaml"), sets, ranks=None, gpus=None)  # noqa: E731
    assert problem(MATH, find=validated).path == "data.train[0].path"
    assert validated(MATH, "data.check_reference=off").warnings == ()


def test_a_process_of_its_own_measures_the_same(tmp_path: Path) -> None:
    """Commands have no torch and ask another process; what it says is what is measured here, values of the environment included."""
    import subprocess
    import sys

    rows(*SHORT, row(LONG))
    here = planned("data.overlong_prompt=drop")
    root = str(Path(prepare.__file__).resolve().parents[2])
    code = (
        "import sys; from pathlib import Path; from rftcli.runtime.prepare import prepare; from rftcli.codec import to_data; import json;"
        "found = prepare(Path('r.yaml'), ['data.overlong_prompt=drop', 'data.train.path=${PLACE}'], ranks=1, gpus=None);"
        "assert 'torch' not in sys.modules; print(json.dumps([to_data(found.lengths), found.plan.steps, found.plan.data.train[0].path]))"
    )
    environment = {**os.environ, "PYTHONPATH": root, "PLACE": str(tmp_path / "rows.jsonl")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    lengths, steps, path = json.loads(done.stdout)
    assert lengths == json.loads(json.dumps([to_data(one) for one in here.lengths])) and steps == here.plan.steps and path == "${PLACE}"


def test_the_order_has_a_seed_of_its_own() -> None:
    """Another run seed samples otherwise and draws the same rows; another data seed draws others."""
    from rftcli.data.prompts import PromptBuilder
    from rftcli.models.load import load_tokenizer
    from rftcli.runtime.inputs import make_source

    rows(*(row(f"{n}=") for n in range(40)))

    def order(*sets: str) -> list[int]:
        plan = planned(*sets).plan
        builder = PromptBuilder(load_tokenizer(plan.policy.path), plan.data.chat, 8, "refuse")
        return [prompt.row for prompt in make_source(plan, builder, [Path.cwd()]).draw(0, 40)]

    assert order("seed=1", "data.seed=7") == order("seed=2", "data.seed=7") != order("seed=1", "data.seed=8")
    assert order("seed=7") == order("seed=1", "data.seed=7") != order("seed=1")


def test_a_filter_and_a_template_are_shown_at_their_keys() -> None:
    rows(*SHORT)
    with pytest.raises(RecipeError) as caught:
        planned("data.train.where='answer >='", "data.train.template='no slot'")
    assert [found.path for found in caught.value.problems] == ["data.train[0].where", "data.train[0].template"]  # type: ignore[attr-defined]
    missing = problem("data.train.where=\"anser == '5'\"")
    assert missing.message.endswith("`where` asks for a column `anser`; it has: prompt, answer (6 of 6 rows have a fault, this is the first)")
    assert missing.hint == "did you mean `answer`?" and "rows.jsonl:1: " in missing.message
    assert problem("data.train.template='{x}'").hint == "the slots of `template` are columns that every row has"


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("command", ["prepare", "validate"])
def test_a_source_of_yours_is_read_once(tmp_path: Path, command: str, light: bool) -> None:
    """Whoever looks at its rows, labels, lengths or answers: in this process, or where another one measures the prompts."""
    import subprocess
    import sys

    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "def rows(name):\n"
        "    with Path('asked.txt').open('a') as file:\n"
        "        file.write(name + ' ')\n"
        "    yield from ({'prompt': f'{n}+1=', 'answer': str(n + 1)} for n in range(8))\n"
    )
    train = "data.train={path: null, python: 'mine:rows', options: {name: train}}"
    held_out = "data.eval={held: {python: 'mine:rows', options: {name: held}}}"
    ranks = "ranks=1" if command == "prepare" else "ranks=None"
    code = (
        f"{'' if light else 'import torch; '}from pathlib import Path; from rftcli.runtime.prepare import {command};"
        f"{command}(Path('r.yaml'), [{train!r}, {held_out!r}], {ranks}, gpus=None)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(prepare.__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "asked.txt").read_text().split()) == ["held", "train"]
