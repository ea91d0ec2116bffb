"""Options that the installed engine has no argument for are told where they stand, by reading its source and without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rftcli.errors import RecipeError
from rftcli.probe.engine_arguments import sglang_arguments, vllm_arguments
from rftcli.recipe.problems import Problem
from rftcli.runtime.prepare import load, validate

EXPLODES = "raise RuntimeError('nobody imports an engine to read a recipe')\n"
ARGUMENTS = """\
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class EngineArgs:
    model: str = "x"
    enforce_eager: bool = False
    max_num_seqs: int | None = None
    tensor_parallel_size: int = 1
    compilation_config: dict | None = None
    table: ClassVar[dict] = {}

    def add_cli_args(parser):
        parser.add_argument("--old-name", "-o", help="deprecated")

@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""
FRONTEND = """\
@config
class BaseFrontendArgs:
    response_role: str = "assistant"

@config
class FrontendArgs(BaseFrontendArgs):
    uvicorn_log_level: str = "info"

def make_arg_parser(parser):
    parser.add_argument("model_tag")
    parser.add_argument("--headless")
"""
RECIPE = """\
models: {policy: {path: 'builtin:quickstart'}}
data: {train: {path: 'builtin:quickstart/train.jsonl'}}
rewards: {default: [{rule: exact}]}
train: {steps: 1}
rollout:
  max_prompt_tokens: 24
  max_new_tokens: 24
  engine: vllm
  vllm:
    options:
      enforce_eager: true
      %s: 1
"""


def package(folder: Path, name: str, files: dict[str, str]) -> None:
    for place, text in {"__init__.py": EXPLODES, **files}.items():
        path = folder / name / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a package of that name whose import fails; the working directory too."""
    package(tmp_path, "vllm", {"engine/arg_utils.py": ARGUMENTS, "entrypoints/launchers/cli_args.py": FRONTEND})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return tmp_path


def told(option: str, *sets: str) -> list[Problem]:
    """Problems of a recipe with this option, as `validate-recipe` tells them."""
    path = Path("r.yaml")
    path.write_text(RECIPE % option)
    try:
        validate(path, sets, ranks=None, gpus=None)
    except RecipeError as error:
        return list(error.problems)
    return []


@pytest.mark.usefixtures("vllm")
def test_what_is_declared() -> None:
    inside, served = vllm_arguments(serve=False), vllm_arguments(serve=True)
    assert inside is not None and served is not None
    assert inside.names == {"model", "enforce_eager", "max_num_seqs", "tensor_parallel_size", "compilation_config"}
    assert served.names - inside.names == {"enable_log_requests", "response_role", "uvicorn_log_level", "headless", "old_name"}
    assert "vllm" not in sys.modules


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("compilation_confg", "did you mean `compilation_config`?"),
        ("compilation-config", "did you mean `compilation_config`?"),  # words of a command line, where a call of a function takes names
        ("tensor_paralel_size", "did you mean `rollout.vllm.tensor_parallel`?"),
        ("max_tokens", "did you mean `rollout.max_new_tokens`?"),
        ("enable_log_requests", None),  # of the server alone
        ("quux", None),
    ],
)
def test_an_option_that_vllm_has_not_is_told_at_its_line(option: str, meant: str | None) -> None:
    (problem,) = told(option)
    assert (problem.path, problem.label) == (f"rollout.vllm.options.{option}", meant)
    assert problem.message == f"this version of vLLM has no argument `{option}`"
    assert problem.place is not None and (problem.place.line, problem.place.column) == (12, 7)
    assert problem.hint is not None and problem.hint.endswith("arg_utils.py")


@pytest.mark.usefixtures("vllm")
def test_it_is_told_beside_broken_rules_and_on_the_way_to_a_plan() -> None:
    found = {problem.path for problem in told("quux", "rollout.samples_per_prompt=1")}
    assert found == {"rollout.samples_per_prompt", "rollout.vllm.options.quux"}
    with pytest.raises(RecipeError, match="1 problem"):
        load(Path("r.yaml"), ())


@pytest.mark.usefixtures("vllm")
def test_a_plan_for_another_machine_is_for_its_vllm() -> None:
    Path("r.yaml").write_text(RECIPE % "quux")
    assert load(Path("r.yaml"), (), elsewhere=True).recipe.rollout.vllm.options == {"enforce_eager": True, "quux": 1}


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("option", ["max_num_seqs", "max-num-seqs", "load_format"])
def test_what_a_rule_tells_is_not_told_twice(option: str) -> None:
    (problem,) = told(option)
    assert problem.code == "vllm-arguments"


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("process", ["rollout.vllm.process=beside", "rollout.vllm.server={start: {servers: 1}}"])
def test_a_server_takes_words_of_a_command_line(process: str) -> None:
    for option in ("response-role", "no-enable-log-requests", "compilation-config.mode", "headless", "old-name", "uvicorn_log_level"):
        assert told(f"'{option}'", process) == [], option
    (problem,) = told("respons_role", process)
    assert problem.message == "this version of `vllm serve` has no argument `respons_role`" and problem.label == "did you mean `response_role`?"


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    "sets",
    [
        ("rollout.engine=hf",),  # nothing is started with them
        ("rollout.vllm.server={start: {servers: 1, command: [/other/vllm, serve]}}",),  # another vLLM
    ],
)
def test_another_engine_knows_itself(sets: tuple[str, ...]) -> None:
    assert told("quux", *sets) == []


@pytest.mark.parametrize(
    "text",
    [
        "class EngineArgs(elsewhere.Base):\n    model: str\n",
        "class EngineArgs(Base):\n    model: str\n",
        "class EngineArgs:\n    enforce_eager: bool\n",
        "EngineArgs = make()\n",
        "class EngineArgs:\n    model: str =\n",
        None,
    ],
)
def test_what_cannot_be_read_is_left_to_vllm(vllm: Path, text: str | None) -> None:
    file = vllm / "vllm" / "engine" / "arg_utils.py"
    file.unlink() if text is None else file.write_text(text)
    assert vllm_arguments(serve=False) is None and vllm_arguments(serve=True) is None
    assert told("quux") == []


JUDGE = "models.scorers={j: {kind: generative, path: 'builtin:quickstart', prompt: '{{ completion }}', score: {regex: '(.)'}, %s}}"
USES = "rewards.default=[{model: j}]"


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("sets", "path"),
    [
        ((JUDGE % "placement: {gpus: 1, options: {quux: 1}}", USES), "models.scorers.j.placement.options.quux"),
        ((JUDGE % "engine: vllm, options: {quux: 1}", USES), "models.scorers.j.options.quux"),
        ((JUDGE % "placement: {gpus: 1, options: {tensor_paralel_size: 1}}", USES), "models.scorers.j.placement.options.tensor_paralel_size"),
        ((JUDGE % "placement: {gpus: 1, options: {quux: 1}}",), None),  # no part asks it
    ],
)
def test_judges_that_the_run_starts(sets: tuple[str, ...], path: str | None) -> None:
    found = told("compilation_config", *sets)
    assert [problem.path for problem in found if problem.code == "engine-option"] == ([] if path is None else [path])
    if path is not None and "paralel" in path:
        (problem,) = found
        assert problem.label == "did you mean `models.scorers.j.placement.tensor_parallel`?"


@pytest.mark.usefixtures("vllm")
def test_a_teacher_that_the_run_starts() -> None:
    teacher = "models.teacher={path: 'builtin:quickstart', placement: {gpus: 1, options: {quux: 1}}}"
    found = told("compilation_config", teacher, "algorithm.advantage.kind=distill")
    assert [problem.path for problem in found if problem.code == "engine-option"] == ["models.teacher.placement.options.quux"]


@pytest.mark.parametrize(
    "files",
    [
        {"srt/server_args.py": "class ServerArgs:\n    model_path: str\n    schedule_policy: str = 'fcfs'\n"},
        {
            "srt/server_args.py": "class ServerArgs:\n    pass\n",
            "srt/arg_groups/fields/model.py": "class Model:\n    _NS_PATH = 'model'\n    model_path: str\n    kept = Derived()\n",
            "srt/arg_groups/fields/schedule.py": "class Schedule:\n    _NS_PATH = 's'\n    schedule_policy: str = 'fcfs'\nclass Other:\n    x: int\n",
        },
    ],
)
def test_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    package(tmp_path, "sglang", files)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    declared = sglang_arguments()
    assert declared is not None and declared.names == {"model_path", "schedule_policy"}
    Path("s.yaml").write_text(RECIPE.replace("vllm", "sglang").replace("enforce_eager", "schedule_policy") % "schedul_policy")
    with pytest.raises(RecipeError) as caught:
        validate(Path("s.yaml"), (), ranks=None, gpus=None)
    (problem,) = caught.value.problems
    assert (problem.path, problem.label) == ("rollout.sglang.options.schedul_policy", "did you mean `schedule_policy`?")
    assert "sglang" not in sys.modules
