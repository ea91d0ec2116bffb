"""What quick commands and the processes of a run import before they do anything: a start is as quick as its imports are few."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rftcli

HEAVY = ("torch", "transformers", "deepspeed", "numpy", "rich", "asyncio", "multiprocessing", "httpx", "jinja2", "datasets", "huggingface_hub")
RUNS = ("rftcli.runtime.launch", "rftcli.runtime.ways", "rftcli.observe.follow", "rftcli.events", "rftcli.engines", "rftcli.stages", "rftcli.models")
RULES = ("rftcli.rewards.mathtext", "rftcli.rewards.choice", "rftcli.rewards.simple", "rftcli.rewards.code_tests", "regex")
PLANS = ("rftcli.plan.plan", "rftcli.plan.compile", "rftcli.types", "psutil")
RECIPE = """
models: {policy: {path: builtin:quickstart}}
data: {train: {path: builtin:quickstart/train.jsonl}, check_reference: "off"}
rollout: {max_prompt_tokens: 24, max_new_tokens: 24}
batch: {prompts_per_step: 32}
train: {steps: 30}
rewards:
  default: [{rule: exact, options: {after: '####'}}]
"""
AFTER = """
import json, sys
from rftcli.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as leave:
    print(json.dumps({"code": leave.code, "modules": sorted(sys.modules)}))
"""


def after(*arguments: str, folder: Path, code: str = AFTER) -> set[str]:
    """The modules of a process that has done a command."""
    env = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}  # commands in this process set it
    env["PYTHONPATH"] = str(Path(rftcli.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["code"] == 0, done.stderr
    return set(told["modules"])


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (("validate-recipe", "recipe.yaml"), (*HEAVY, *RUNS, *RULES, *PLANS)),
        (("explain", "rollout.temperature"), (*HEAVY, *RUNS, *RULES, *PLANS, "rftcli.runtime", "rftcli.data")),
        (("show", "recipe.yaml"), (*HEAVY, *RUNS, *RULES)),
        (("--help",), (*HEAVY, "typer", "pydantic", "yaml", "inspect", "rftcli.recipe")),
    ],
)
def test_a_quick_command_imports_what_it_needs(tmp_path: Path, arguments: tuple[str, ...], without: tuple[str, ...]) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert not after(*arguments, folder=tmp_path) & set(without)


def test_a_plan_needs_nothing_of_a_run(tmp_path: Path) -> None:
    """Prompts that were never measured are, by a tokenizer in a process of its own."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert not after("plan", "recipe.yaml", "--ranks", "1", folder=tmp_path) & {*HEAVY, *RUNS, *RULES}


@pytest.mark.parametrize(("module", "without"), [("starter", ("rftcli.recipe", "rftcli.plan", "pydantic", "typer", "yaml")), ("rank", ("typer",))])
def test_processes_of_a_run_begin_with_little(tmp_path: Path, module: str, without: tuple[str, ...]) -> None:
    """A rank says that it is there before it imports torch, and the starter never does."""
    code = f"import json, sys, rftcli.runtime.{module}; print(json.dumps({{'code': 0, 'modules': sorted(sys.modules)}}))"
    assert not after(folder=tmp_path, code=code) & {*HEAVY, *RUNS, *RULES, *without}


@pytest.mark.parametrize(("command", "switch"), [(("explain", "train.steps"), "__all__"), (("rewards", "try", "recipe.yaml"), None)])
def test_plugins_of_pydantic_are_looked_for_where_own_code_runs(
    tmp_path: Path, command: tuple[str, ...], switch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking reads the metadata of every installed package."""
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS", raising=False)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    code = AFTER.replace('"modules": sorted(sys.modules)', '"modules": [__import__("os").environ.get("PYDANTIC_DISABLE_PLUGINS")]')
    assert after(*command, folder=tmp_path, code=code) == {switch}
