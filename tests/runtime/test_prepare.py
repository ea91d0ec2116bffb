"""From a recipe on disk to a plan: every problem at its place and all at once, exit code 2; nothing is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch  # noqa: F401 - with it here, prompts are measured in this process, not in one of their own

from rftcli.errors import EXIT_MACHINE, EXIT_USAGE, MachineError, RecipeError, UsageError
from rftcli.plan.plan import plan_from_json, plan_to_json
from rftcli.probe.machine import other_machine
from rftcli.recipe.problems import Problem
from rftcli.recipe.schema import resolved_yaml
from rftcli.runtime.environment import live_plan
from rftcli.runtime.prepare import Prepared, prepare, recipe_path, validate

RECIPE = """\
models:
  policy: {path: 'builtin:quickstart'}
data:
  train: {path: rows.jsonl}
rollout: {max_prompt_tokens: 24, max_new_tokens: 24}
rewards:
  default: [{rule: exact}]
batch: {prompts_per_step: 4}
train: {steps: 2}
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory and a cache of its own, and no GPU, whatever this machine has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(10)))


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str = RECIPE, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return Path(name)

    return write


def plan(path: Path, *sets: str, ranks: int | None = 1, gpus: int | None = None) -> Prepared:
    return prepare(path, sets, ranks=ranks, gpus=gpus)


def refused(path: Path, *sets: str, ranks: int | None = 1) -> tuple[str, dict[str, Problem]]:
    """(rendered text, path -> problem) of a recipe with problems."""
    with pytest.raises(RecipeError) as caught:
        plan(path, *sets, ranks=ranks)
    assert caught.value.exit_code == EXIT_USAGE == 2
    found = [item for item in caught.value.problems if isinstance(item, Problem)]
    assert len({item.path for item in found}) == len(found)
    return str(caught.value), {item.path: item for item in found}


def at(problem: Problem) -> tuple[int, int, str]:
    """(line, column, the text under the caret)"""
    place = problem.place
    assert place is not None
    return place.line, place.column, place.text[place.column - 1 : place.column - 1 + place.length]


def test_a_plan_for_this_machine(recipe: Callable[..., Path], tmp_path: Path) -> None:
    found = plan(recipe(), ranks=2)
    assert found.plan.name == "r" and found.plan.world.ranks == 2 and found.plan.world.device == "cpu"
    assert found.plan.policy.given == "builtin:quickstart" and Path(found.plan.policy.path).is_dir()
    assert found.plan.policy.parameters is not None and found.plan.rewards.search_path == str(tmp_path)
    assert found.data is not None and found.data.train_rows == 10 and found.data.eval.sets == ()
    assert found.warnings == ()
    assert plan(recipe(), "name=mine").plan.name == "mine"
    assert plan(recipe(), ranks=None).plan.world.ranks == 1


@pytest.mark.parametrize(
    ("form", "key", "message"),
    [
        ("{regex: (a}", "regex", "not a form that can be sampled: invalid regex"),
        ("{json_schema: {type: objct}}", "json_schema", "not a form that can be sampled: Invalid type: objct"),
    ],
)
def test_a_form_that_is_none_is_refused_at_its_place(recipe: Callable[..., Path], form: str, key: str, message: str) -> None:
    path = recipe(RECIPE.replace("max_new_tokens: 24}", f"max_new_tokens: 24, structured: {form}}}"))
    _, found = refused(path)
    problem = found[f"rollout.structured.{key}"]
    assert problem.message.startswith(message) and at(problem)[0] == 5
    with pytest.raises(RecipeError):
        validate(path, [], ranks=None, gpus=None)
    assert plan(path, "rollout.structured={regex: a+, json_schema: null}").plan.rollout.structured == {"regex": "a+"}


def test_nothing_heavy_is_imported(recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from pathlib import Path; from rftcli.runtime.prepare import prepare;"
        "prepare(Path(sys.argv[1]), [], ranks=1, gpus=None);"
        "print([name for name in ('torch', 'transformers', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    root = str(Path(__file__).resolve().parents[2])
    result = subprocess.run(
        [sys.executable, "-c", code, str(recipe())], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_batch_that_does_not_divide_is_shown_at_its_line(recipe: Callable[..., Path]) -> None:
    text, problems = refused(recipe(RECIPE.replace("prompts_per_step: 4", "prompts_per_step: 500")), ranks=6)
    problem = problems["batch.prompts_per_step"]
    assert at(problem) == (8, 27, "500")
    assert "must be a multiple of updates_per_step x ranks (1 x 6 = 6)" in problem.message
    assert "Nearest that fit, changing one number: prompts_per_step 498 or 504; ranks 5 or 10" in problem.message
    lines = text.splitlines()
    assert lines[0] == "error: 1 problem in r.yaml" and lines[2].startswith("r.yaml:8:27  batch.prompts_per_step  ")
    assert lines[3:6] == ["  |", "8 | batch: {prompts_per_step: 500}", "  |                           ^^^"]
    assert lines[-1] == "hint: `rft explain batch.prompts_per_step`"


def test_a_batch_that_is_not_written_is_shown_all_the_same(recipe: Callable[..., Path]) -> None:
    _, problems = refused(recipe(RECIPE.replace("batch: {prompts_per_step: 4}\n", "")), ranks=3)
    assert "got 64" in problems["batch.prompts_per_step"].message


def test_a_label_without_a_reward(recipe: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b", "kind": "math"}\n' + '{"prompt": "a", "answer": "b", "kind": "coed"}\n' * 3)
    text = RECIPE.replace("rows.jsonl}", "rows.jsonl, columns: {label: kind}}")
    text = text.replace("  default: [{rule: exact}]", "  code: [{rule: exact}]\n  math: [{rule: exact}]")
    _, problems = refused(recipe(text))
    problem = problems["rewards"]
    assert "3 rows with the label `coed`" in problem.message and "rows.jsonl:2" in problem.message
    assert problem.hint == "did you mean `code`? entries of `rewards`: `code`, `math`"
    assert at(problem)[0] == 6


def test_evaluation_has_a_reward_table_of_its_own(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """Rows of an evaluation set are checked against `eval.rewards`, rows of training against `rewards`, each problem at its own key."""
    (tmp_path / "held.jsonl").write_text('{"prompt": "a", "answer": "b", "kind": "maths"}\n')
    sets = ("data.eval.held={path: held.jsonl, columns: {label: kind}}", "eval.rewards.math=[{rule: exact}]", "eval.every=1")
    _, problems = refused(recipe(), *sets)
    assert set(problems) == {"eval.rewards"}
    assert "1 row with the label `maths`" in problems["eval.rewards"].message and "`eval.rewards` has no entry" in problems["eval.rewards"].message
    assert problems["eval.rewards"].hint == "did you mean `math`? entries of `eval.rewards`: `math`"

    (tmp_path / "held.jsonl").write_text('{"prompt": "a", "answer": "b", "kind": "math"}\n')
    prepared = plan(recipe(), *sets)
    assert set(prepared.plan.rewards.labels) == {"default"} and set(prepared.plan.eval_rewards.labels) == {"math"}
    assert prepared.warnings == ()

    _, problems = refused(recipe(), *sets, "eval.rewards.math[0].options={casefold: 3}")
    assert "eval.rewards.math.parts[0].options" in problems
    _, problems = refused(recipe(), *sets, "eval.rewards.math=[{python: 'nowhere:f'}]")
    assert "eval.rewards.math.parts[0].python" in problems


def test_votes_need_an_answer_to_count(recipe: Callable[..., Path]) -> None:
    sets = ("data.eval.held={path: rows.jsonl, samples_per_prompt: 2}", "eval={temperature: 1, vote_k: [2]}")
    assert plan(recipe(), *sets).plan.eval.vote_k == (2,)
    _, problems = refused(recipe(), *sets, "eval.rewards.default=[{rule: length, options: {target: 1, limit: 2}}]")
    assert "no reward has a rule that reads an answer" in problems["eval.vote_k"].message and "math_answer" in str(problems["eval.vote_k"].hint)


def test_missing_columns(recipe: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    _, problems = refused(recipe(RECIPE.replace("rows.jsonl", "other.jsonl")))
    problem = problems["data.train[0].path"]
    assert "other.jsonl:1: no column `prompt`; it has: question, answer" in problem.message
    assert at(problem) == (4, 17, "other.jsonl") and problem.hint == "name the right one: `columns: {prompt: ...}`"


def test_a_reward_that_needs_a_reference(recipe: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    _, problems = refused(recipe())
    assert "1 of 1 row with the label `default` without a reference" in problems["rewards"].message


def test_everything_that_is_wrong_at_once(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """A model, two of three data sets, an evaluation set, the reference and the batch; sets that can be read say nothing."""
    text = """\
models:
  policy: {path: ./nothing}
  reference: {from: ./neither}
data:
  train:
    - {path: rows.jsonl, columns: {prompt: question}}
    - {path: gone.jsonl}
    - {name: good, path: rows.jsonl}
  eval:
    test: {python: 'no_module:rows'}
rewards:
  default: [{rule: exact}]
  math: [{rule: exact}]
algorithm: {kl: {coefficient: 0.1}}
batch: {prompts_per_step: 3}
train: {data_passes: 1}
"""
    _, problems = refused(recipe(text), ranks=2)
    assert list(problems) == [
        "models.policy.path", "models.reference.from", "data.train[0].path", "data.train[1].path", "data.eval.test.python", "batch.prompts_per_step",
    ]  # fmt: skip
    assert [at(item)[0] for item in problems.values()] == [2, 3, 6, 7, 10, 15]
    assert f"{tmp_path}/nothing does not exist" in problems["models.policy.path"].message
    assert at(problems["data.eval.test.python"])[2] == "'no_module:rows'"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("builtin:quickstrat", "there is no builtin `quickstrat`, did you mean `quickstart`?"),
        ("./rows.jsonl", "neither a model directory nor a GGUF file"),
        ("./empty", "holds no config.json"),
        ("not a model", "not a model does not exist"),
    ],
)
def test_a_model_that_is_none(recipe: Callable[..., Path], tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    _, problems = refused(recipe(RECIPE.replace("builtin:quickstart", path)))
    assert message in problems["models.policy.path"].message and at(problems["models.policy.path"])[0] == 2


def test_a_hub_out_of_reach_is_the_machines_fault(recipe: Callable[..., Path]) -> None:
    with pytest.raises(MachineError) as caught:
        plan(recipe(RECIPE.replace("builtin:quickstart", "no-such-organisation/no-such-model")))
    assert caught.value.exit_code == EXIT_MACHINE


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed(recipe: Callable[..., Path], engine: str) -> None:
    """Said by name when it is asked for; `auto` goes on without it."""
    with pytest.raises(MachineError, match=f"needs the package `{engine}`") as caught:
        plan(recipe(), f"rollout.engine={engine}")
    assert caught.value.hint == f"pip install 'rftcli[{engine}]'"
    assert plan(recipe()).plan.rollout.engine == "hf"


def test_a_reference_is_looked_at_only_where_it_is_needed(recipe: Callable[..., Path]) -> None:
    unused = plan(recipe(), "models.reference.from=./neither").plan
    assert unused.reference is None
    same = plan(recipe(), "algorithm.kl.coefficient=0.1").plan
    assert same.reference == same.policy
    other = plan(recipe(), "algorithm.kl.coefficient=0.1", "models.reference.from='builtin:quickstart'").plan
    assert other.reference is not None and other.reference.path == other.policy.path


@pytest.mark.parametrize(
    ("reward", "path", "message"),
    [
        ("{python: 'no_module:fn'}", "rewards.default.parts[0].python", "there is no module `no_module`"),
        ("{python: 'mine:fm'}", "rewards.default.parts[0].python", "has no `fm`"),
        ("{python: 'mine:fn', options: {b: 1}}", "rewards.default.parts[0].python", "takes no option `b`"),
        ("{rule: exact, options: {casefold: 3}}", "rewards.default.parts[0].options", "must be true or false"),
        ("{rule: exakt}", "rewards.default.parts[0].rule", "unknown rule `exakt`"),
    ],
)
def test_rewards_that_cannot_be_used(recipe: Callable[..., Path], tmp_path: Path, reward: str, path: str, message: str) -> None:
    (tmp_path / "mine.py").write_text("def fn(completion, a=1): return 1.0\n")
    _, problems = refused(recipe(RECIPE.replace("{rule: exact}", reward)))
    assert list(problems) == [path] and message in problems[path].message and at(problems[path])[0] == 7


def test_the_recipes_folder_is_where_things_are_looked_for(recipe: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    path = recipe(RECIPE.replace("{rule: exact}", "{python: 'own_reward:fn'}"), "deep/er/r.yaml")
    (folder / "own_reward.py").write_text("def fn(completion): return 1.0\n")
    (tmp_path / "rows.jsonl").rename(folder / "rows.jsonl")
    found = plan(path).plan
    assert found.data.train[0].path == str(folder / "rows.jsonl") and found.rewards.search_path == str(folder)


def test_passes_count_training_rows_alone(recipe: Callable[..., Path]) -> None:
    """A training set and an evaluation set of one name are two sets."""
    text = RECIPE.replace("train: {path: rows.jsonl}", "train: {name: same, path: rows.jsonl}\n  eval: {same: {path: rows.jsonl, limit: 3}}")
    found = plan(recipe(text.replace("steps: 2", "data_passes: 2")))
    assert found.plan.steps == 5  # 2 x 10 rows at 4 a step
    assert found.data is not None and [one.rows for one in found.data.eval.sets] == [3]


def test_warnings(recipe: Callable[..., Path]) -> None:
    found = plan(recipe(RECIPE.replace("prompts_per_step: 4", "prompts_per_step: 16")), "rewards.defualt=[{rule: exact}]")
    assert found.warnings == (
        "`rewards.defualt` is never used: no row has this label",
        "the training data has 10 rows, a step draws 16: rows repeat within a step",
    )


@pytest.mark.parametrize(("flags", "told"), [("fpu avx2", True), ("fpu avx2 avx512bw avx512vl avx512dq", False)])
def test_bfloat16_on_a_cpu_without_it_is_warned_of(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, told: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr("rftcli.probe.machine.CPUINFO", tmp_path / "cpuinfo")
    assert any("only imitates bfloat16" in text for text in plan(recipe(), "models.policy.dtype=bfloat16").warnings) is told
    assert not any("imitates" in text for text in plan(recipe()).warnings)


def test_sampling_of_a_label_that_no_row_has(recipe: Callable[..., Path]) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(recipe(), "rollout.by_label.maht.temperature=0.5")
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == ("rollout.by_label.maht", "no training row has the label `maht`")
    assert problem.hint == "labels of the training sets: default"
    assert plan(recipe(), "rollout.by_label.default.temperature=0.5").plan.rollout.by_label["default"].temperature == 0.5


def test_ranks_and_gpus_exclude_each_other(recipe: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="--ranks is for the CPU and --gpus for GPUs"):
        plan(recipe(), ranks=2, gpus=2)
    with pytest.raises(UsageError, match="--ranks is for the CPU and --gpus for GPUs"):
        validate(recipe(), [], ranks=2, gpus=2)


def test_more_gpus_than_there_are(recipe: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="--gpus 2, but this machine has 0") as caught:
        plan(recipe(), ranks=None, gpus=2)
    assert caught.value.exit_code == EXIT_MACHINE and caught.value.hint is not None and "--ranks" in caught.value.hint
    with_gpus(tmp_path, 4)
    assert plan(recipe(), ranks=None, gpus=2).plan.world.ranks == 2
    every = plan(recipe(), ranks=None).plan
    assert (every.world.ranks, every.world.device, every.world.backend) == (4, "cuda", "nccl")
    assert plan(recipe(), ranks=2).plan.world.device == "cpu"


def with_gpus(folder: Path, count: int) -> None:
    """An `nvidia-smi` that lists some."""
    (folder / "bin").mkdir(exist_ok=True)
    script = folder / "bin" / "nvidia-smi"
    script.write_text("#!/bin/sh\n" + "echo 'GPU, 81920'\n" * count)
    script.chmod(0o755)


def test_names_of_shipped_recipes(recipe: Callable[..., Path], tmp_path: Path) -> None:
    shipped = recipe_path(Path("quickstart"))
    assert shipped.is_file() and shipped.name == "quickstart.yaml"
    (tmp_path / "quickstart").mkdir()
    assert recipe_path(Path("quickstart")) == shipped  # a run directory of that name is no recipe
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text(RECIPE)
    assert recipe_path(Path("quickstart")) == Path("quickstart")  # a file is
    for given in ("r.yaml", "folder/quickstart", "./missing.yaml"):
        assert recipe_path(Path(given)) == Path(given)
    with pytest.raises(UsageError) as caught:
        recipe_path(Path("quickstrat"))
    assert "did you mean `quickstart`?" in caught.value.message and "quickstart" in str(caught.value.hint) and caught.value.exit_code == EXIT_USAGE
    with pytest.raises(UsageError, match="no shipped recipe of that name"):
        recipe_path(Path("zzzzzz"))


def test_a_file_that_is_not_there(recipe: Callable[..., Path]) -> None:
    recipe()
    with pytest.raises(RecipeError, match="cannot be read") as caught:
        plan(Path("x.yaml"))
    assert caught.value.exit_code == EXIT_USAGE


def test_the_shipped_quickstart_is_planned_from_anywhere() -> None:
    found = plan(Path("quickstart"), ranks=2)
    assert found.plan.name == "quickstart" and found.warnings == ()


def saved(recipe: Callable[..., Path], tmp_path: Path, ranks: int = 2) -> Path:
    (tmp_path / "plan.json").write_text(plan_to_json(plan(recipe(), ranks=ranks).plan))
    return Path("plan.json")


def test_a_plan_that_was_written_is_taken_as_it_is(recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = saved(recipe, tmp_path)
    found = plan(path, ranks=None)
    assert found.plan == plan(recipe(), ranks=2).plan and found.loaded is None and found.data is None
    assert plan(path, ranks=2).plan == found.plan


def test_refusals_of_a_plan(recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = saved(recipe, tmp_path)
    with pytest.raises(UsageError, match="--set changes a recipe; a plan is finished"):
        plan(path, "seed=1")
    with pytest.raises(UsageError, match="the plan is for 2 x cpu, 3 x cpu were asked for"):
        plan(path, ranks=3)
    with_gpus(tmp_path, 2)
    with pytest.raises(UsageError, match="the plan is for 2 x cpu, 2 x cuda were asked for"):
        plan(path, ranks=None, gpus=2)


def test_a_plan_for_gpus_on_a_machine_without(recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = saved(recipe, tmp_path)
    cpu = plan_from_json(path.read_text())
    path.write_text(plan_to_json(replace(cpu, world=replace(cpu.world, device="cuda", backend="nccl"))))
    with pytest.raises(MachineError, match="the plan is for 2 GPUs, this machine has 0"):
        plan(path, ranks=None)
    with pytest.raises(UsageError, match="the plan is for 2 x cuda, 2 x cpu were asked for"):
        plan(path, ranks=2)
    with_gpus(tmp_path, 2)
    assert plan(path, ranks=None).plan.world.device == "cuda"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 99}'])
def test_a_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=r"plan\.json is not a plan") as caught:
        plan(Path("plan.json"))
    assert caught.value.exit_code == EXIT_USAGE and "rft plan RECIPE --out" in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"gone\.json is not a plan"):
        plan(Path("gone.json"))


def test_values_of_the_environment_stay_out_of_the_plans_data(recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data path keeps its `${NAME}`, also a relative one; it is found all the same, and moves when the variable does."""
    monkeypatch.setenv("ROWS_AT", str(tmp_path / "hidden-place"))
    monkeypatch.setenv("FOLDER", "hidden-folder")
    (tmp_path / "hidden-place").mkdir()
    (tmp_path / "hidden-folder").mkdir()
    for folder in ("hidden-place", "hidden-folder"):
        (tmp_path / folder / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text())
    train = "[{path: '${ROWS_AT}/rows.jsonl'}, {path: '${FOLDER}/rows.jsonl'}]"
    text = RECIPE.replace("{path: rows.jsonl}", train + "\n  eval: {t: {path: '${ROWS_AT}/rows.jsonl'}}")
    found = plan(recipe(text))
    assert [spec.path for spec in (*found.plan.data.train, *found.plan.data.eval)] == [
        "${ROWS_AT}/rows.jsonl", f"{tmp_path}/${{FOLDER}}/rows.jsonl", "${ROWS_AT}/rows.jsonl",
    ]  # fmt: skip
    assert found.data is not None and found.data.train_rows == 20
    assert "hidden-" not in plan_to_json(found.plan)
    assert found.loaded is not None and "hidden-" not in resolved_yaml(found.loaded)


def test_a_plan_lives_with_what_the_environment_says(recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults, a whole name of builtin data or of a model, and options: kept in the plan, replaced once, on the ranks."""
    for name, value in {"DATA": "builtin:quickstart/train.jsonl", "MODEL": "builtin:quickstart", "COUNT": "31337", "KEY": "hidden-key"}.items():
        monkeypatch.setenv(name, value)
    train = "\n    - path: '${NO_SUCH:-.}/rows.jsonl'\n    - path: ${DATA}\n    - python: rows_by_count:rows\n      options:\n        n: ${COUNT}\n"
    policy = "\n    path: ${MODEL}\n    chat: {prefill: 'a ${KEY} $${KEY}'}\n    options:\n      token: ${KEY}\n      n: ${COUNT}\n"
    text = RECIPE.replace(" {path: rows.jsonl}", train).replace(" {path: 'builtin:quickstart'}", policy).replace("tokens: 24,", "tokens: 48,")
    (tmp_path / "rows_by_count.py").write_text("def rows(n): return [{'prompt': 'a', 'answer': 'b', 'n': n}]\n")
    kept = plan(recipe(text)).plan
    written = plan_to_json(kept)
    assert not any(value in written for value in ("hidden-key", "31337", "builtin:quickstart"))
    live = live_plan(plan_from_json(written), os.environ)
    assert [spec.path for spec in live.data.train] == [f"{tmp_path}/./rows.jsonl", "builtin:quickstart/train.jsonl", None]
    assert live.data.train[2].options == {"n": 31337} and live.policy.options == {"token": "hidden-key", "n": 31337}
    assert live.data.chat.prefill == "a hidden-key ${KEY}"
    assert Path(live.policy.path).is_dir() and live.policy.given == "${MODEL}"
    monkeypatch.delenv("KEY")
    with pytest.raises(UsageError, match="environment variable `KEY` is not set"):
        live_plan(kept, os.environ)


def test_a_literal_dollar_brace_survives(recipe: Callable[..., Path]) -> None:
    """Expanded once: what a recipe writes as `$${x}` is the text `${x}`, also for a path and a pattern."""
    text = RECIPE.replace("{path: rows.jsonl}", "{path: rows.jsonl, extract_reference: '(.*|$${x})'}")
    text = text.replace("max_new_tokens: 24}", "max_new_tokens: 24, stop: ['$${end}']}")
    kept = plan(recipe(text)).plan
    live = live_plan(plan_from_json(plan_to_json(kept)), {})
    assert live.data.train[0].extract_reference == "(.*|${x})" and live.rollout.stop == ("${end}",)


def test_validation_needs_no_model_and_no_machine(recipe: Callable[..., Path]) -> None:
    path = recipe(RECIPE.replace("builtin:quickstart", "org/not-here"))
    assert validate(path, [], ranks=None, gpus=None).summary == "(4 prompts a step run on 1, 2, 4 ranks)"
    assert validate(path, ["batch.prompts_per_step=1024"], ranks=None, gpus=None).summary == (
        "(1024 prompts a step run on 1, 2, 4, 8, 16, 32, 64, 128, ... 1024 ranks)"
    )
    assert validate(path, [], ranks=2, gpus=None).warnings == ()


def test_validation_for_a_number_of_ranks(recipe: Callable[..., Path]) -> None:
    for given in ({"ranks": 3, "gpus": None}, {"ranks": None, "gpus": 3}):
        with pytest.raises(RecipeError) as caught:
            validate(recipe(), [], **given)
        (problem,) = [item for item in caught.value.problems if isinstance(item, Problem)]
        assert problem.path == "batch.prompts_per_step" and "prompts_per_step 3 or 6" in problem.message and at(problem) == (8, 27, "4")
    with pytest.raises(RecipeError, match="multiple of updates_per_step"):
        validate(recipe(), ["batch.updates_per_step=3"], ranks=None, gpus=None)


def test_validation_reads_the_first_thousand_rows(recipe: Callable[..., Path], tmp_path: Path) -> None:
    good = '{"prompt": "a", "answer": "b"}\n'
    (tmp_path / "rows.jsonl").write_text(good * 1000 + "{}\n")
    validate(recipe(), [], ranks=None, gpus=None)
    _, problems = refused(recipe())
    assert "rows.jsonl:1001" in problems["data.train[0].path"].message


def test_kernels_that_are_not_installed(recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is read; for another machine it is that one's business."""
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    for command in (plan, lambda path, *sets: validate(path, sets, ranks=None, gpus=None)):
        with pytest.raises(MachineError, match="needs the package `liger-kernel`") as caught:
            command(recipe(), "train.kernels=liger")
        assert caught.value.hint is not None and caught.value.hint.startswith("pip install 'rftcli[liger]'")
    there = prepare(recipe(), ["train.kernels=liger", "rollout.engine=hf"], ranks=None, gpus=None, other=other_machine("1xH100-80"))
    assert there.plan.policy.kernels == "liger"


def test_attention_that_is_not_installed(recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    for command in (plan, lambda path, *sets: validate(path, sets, ranks=None, gpus=None)):
        with pytest.raises(MachineError, match="attention: flash_2 needs the package `flash_attn`") as caught:
            command(recipe(), "models.policy.attention=flash_2")
        assert caught.value.hint is not None and "varlen" in caught.value.hint


def test_kernels_on_a_cpu(recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages" / "liger_kernel").mkdir(parents=True)
    (tmp_path / "packages" / "liger_kernel" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "liger_kernel", raising=False)
    _, problems = refused(recipe(), "train.kernels=liger")
    assert set(problems) == {"train.kernels"} and "needs a GPU" in problems["train.kernels"].message


def test_ranks_on_a_machine_with_gpus_are_told_what_they_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (tmp_path / "r.yaml").write_text(RECIPE)
    told = prepare(tmp_path / "r.yaml", ["data.train.columns.reference=answer"], ranks=1, gpus=None)
    assert told.plan.world.device == "cpu"
    assert any("1 GPU is left alone (--gpus 1)" in warning for warning in told.warnings)
