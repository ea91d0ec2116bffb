"""The house stands: arrows point down, light rooms stay light, tables and recipe agree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import rftcli

ROOT = Path(rftcli.__file__).parent
BASE = {"errors", "types", "events", "protocols", "codec", "redact", "ports"}
# Room -> rooms or single modules it may import from, besides itself and BASE.
ARROWS: dict[str, set[str]] = {
    "algo": set(),
    "recipe": set(),
    "builtin": set(),
    "data": {"algo.keyed", "builtin"},
    "rewards": {"algo.shaping"},
    "plan": {"recipe.sections", "algo.batchmath", "data.spec", "rewards.spec", "rewards.scorers.spec"},
    "probe": {"plan.facts", "data"},
    "engines": {"algo"},
    "models": {"algo"},
    "stages": {"algo", "plan.plan", "plan.plan_sampling"},
    "observe": set(),
    "runtime": {"algo", "builtin", "data", "engines", "models", "observe", "plan", "probe", "recipe", "rewards", "stages"},
    "cli": {"observe", "plan", "probe", "recipe", "runtime", "rewards"},
}
LIGHT = [
    "rftcli.errors", "rftcli.types", "rftcli.events", "rftcli.protocols", "rftcli.codec",
    "rftcli.recipe.load", "rftcli.recipe.written", "rftcli.recipe.rules", "rftcli.recipe.explain", "rftcli.recipe.schema",
    "rftcli.plan.compile", "rftcli.plan.show", "rftcli.probe.machine", "rftcli.probe.model", "rftcli.probe.data", "rftcli.probe.lengths",
    "rftcli.data.rows", "rftcli.data.source", "rftcli.data.prompts", "rftcli.rewards.rules", "rftcli.rewards.table", "rftcli.rewards.functions",
    "rftcli.builtin", "rftcli.engines.fake", "rftcli.engines.table", "rftcli.observe.table", "rftcli.observe.history", "rftcli.observe.plain",
    "rftcli.observe.lessons", "rftcli.observe.follow", "rftcli.runtime.checks", "rftcli.runtime.measure", "rftcli.runtime.references",
    "rftcli.runtime.prepare", "rftcli.runtime.start", "rftcli.runtime.launch", "rftcli.probe.engine_arguments", "rftcli.runtime.engine_options",
    "rftcli.engines.vllm_http", "rftcli.engines.vllm_offer", "rftcli.engines.vllm_serve", "rftcli.runtime.engine_guard",
    "rftcli.runtime.engine_process", "rftcli.plan.compile_server",
    "rftcli.redact", "rftcli.runtime.hosts", "rftcli.runtime.joined", "rftcli.runtime.warden", "rftcli.runtime.travel",
    "rftcli.cli.main", "rftcli.cli.train", "rftcli.cli.resume", "rftcli.cli.evaluate", "rftcli.cli.validate", "rftcli.cli.plan",
    "rftcli.cli.explain", "rftcli.cli.schema", "rftcli.cli.samples", "rftcli.cli.rewards", "rftcli.runtime.try_rewards", "rftcli.cli.export",
    "rftcli.cli.clean", "rftcli.rewards.scorers.desk", "rftcli.rewards.scorers.http", "rftcli.rewards.scorers.judge", "rftcli.rewards.scorers.own",
    "rftcli.runtime.scorer_checks",
    "rftcli.runtime.compare", "rftcli.runtime.clean", "rftcli.runtime.export", "rftcli.observe.sample_view", "rftcli.algo.votes",
    "rftcli.algo.paired",
]  # fmt: skip
HEAVY = ("torch", "transformers", "deepspeed", "vllm", "sglang", "diffusers")


def imports(path: Path) -> set[str]:
    """Our modules that a file imports, without the package name: `algo.keyed`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("rftcli.") for name in found if name.startswith("rftcli.")}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def test_every_room_is_known() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    assert rooms == set(ARROWS)


@pytest.mark.parametrize("room", sorted(ARROWS))
def test_arrows_point_down(room: str) -> None:
    allowed = {room} | BASE | ARROWS[room]
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(room)
        for name in imports(path)
        if not any(name == target or name.startswith(f"{target}.") for target in allowed | {"__version__"})
    ]
    assert not wrong, wrong


def test_base_imports_no_room() -> None:
    for name in BASE:
        wrong = {item for item in imports(ROOT / f"{name}.py") if item.split(".")[0] not in BASE}
        assert not wrong, (name, wrong)


def test_light_rooms_are_light() -> None:
    """In one fresh process: importing every module that must stay light loads none of the heavy packages."""
    look = f"    bad = [h for h in {HEAVY!r} if h in sys.modules]\n    assert not bad, (name, bad)"
    code = f"import sys, importlib\nfor name in {LIGHT!r}:\n    importlib.import_module(name)\n{look}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert result.returncode == 0, result.stderr


def test_pydantic_only_in_recipe() -> None:
    for path in ROOT.rglob("*.py"):
        if "recipe" not in path.relative_to(ROOT).parts:
            assert "import pydantic" not in path.read_text() and "from pydantic" not in path.read_text(), path


def test_the_process_group_has_one_door() -> None:
    allowed = {"runtime/world.py", "runtime/learner.py", "engines/vllm_group.py"}  # the last: a group of its own with servers, for weights
    for path in ROOT.rglob("*.py"):
        if "torch.distributed" in path.read_text() or "deepspeed.comm" in path.read_text():
            assert str(path.relative_to(ROOT)) in allowed, path


def test_only_cli_and_observe_print() -> None:
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        if room in ("cli", "observe", "__main__.py"):
            continue
        calls = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
        allowed = {"runtime/rank.py", "rewards/math_worker.py"}  # a rank's own log; a worker's reply line
        assert not calls or str(path.relative_to(ROOT)) in allowed, path


def literal(section: type, field: str) -> set[object]:
    found: set[object] = set()

    def walk(hint: object) -> None:
        for argument in get_args(hint):
            if get_args(argument):
                walk(argument)
            elif isinstance(argument, (str, int)) and not isinstance(argument, bool):
                found.add(argument)

    walk(section.model_fields[field].annotation)  # type: ignore[attr-defined]
    return found or set(get_args(section.model_fields[field].annotation))  # type: ignore[attr-defined]


def test_tables_equal_schema() -> None:
    from rftcli.algo.advantages import ADVANTAGES
    from rftcli.algo.kl import KLS
    from rftcli.algo.losses import LOSSES
    from rftcli.algo.reduce import AGGREGATES
    from rftcli.algo.schedules import SCHEDULES
    from rftcli.engines.table import SAMPLERS
    from rftcli.recipe import sections
    from rftcli.recipe.sections.loss import LOSS_OPTIONS, NAMED_OPTIONS, ONE_TERM
    from rftcli.recipe.update_rules import OPTIMIZER_OPTIONS
    from rftcli.rewards import spec
    from rftcli.runtime.optimizers import OPTIMIZERS

    assert literal(sections.Advantage, "kind") == set(ADVANTAGES)
    assert literal(sections.Loss, "kind") == set(LOSSES)
    assert literal(sections.Loss, "aggregate") == set(AGGREGATES)
    assert {name: set(row.options) for name, row in LOSSES.items()} == {
        name: set(NAMED_OPTIONS[name]) | set(LOSS_OPTIONS[name]) for name in LOSS_OPTIONS
    }
    assert {name for name, row in LOSSES.items() if row.unit == "sequence"} == set(ONE_TERM)
    assert literal(sections.Kl, "estimator") == set(KLS)
    assert literal(sections.Optimizer, "schedule") == set(SCHEDULES)
    assert literal(sections.Optimizer, "kind") == set(OPTIMIZERS) == set(OPTIMIZER_OPTIONS)
    assert literal(sections.Rollout, "engine") - {"auto"} == set(SAMPLERS)
    assert literal(sections.RewardPart, "on_error") == set(spec.ON_ERROR)
    assert literal(sections.RewardPart, "text") == set(spec.TEXTS)


def test_recipe_rules_know_the_tables() -> None:
    """`recipe` imports no other room: what it repeats of one is held to it here."""
    from rftcli.algo.advantages import ADVANTAGES
    from rftcli.recipe import finding, sections
    from rftcli.recipe.sections.algorithm import GROUP_ESTIMATORS
    from rftcli.rewards.functions import RECORD
    from rftcli.rewards.rules import REQUIRED

    assert {name for name, row in ADVANTAGES.items() if row.min_samples > 1} == {name for name, row in ADVANTAGES.items() if row.baseline}
    assert {name for name, row in ADVANTAGES.items() if row.baseline} == GROUP_ESTIMATORS
    assert finding.REQUIRED == REQUIRED
    assert f"any of {', '.join(RECORD)}, and" in str(sections.RewardPart.model_fields["python"].description)


def test_what_is_built_is_not_called_missing() -> None:
    from rftcli.algo.advantages import ADVANTAGES
    from rftcli.algo.kl import KLS
    from rftcli.algo.losses import LOSSES
    from rftcli.engines.table import SAMPLERS
    from rftcli.recipe.kinds import keys
    from rftcli.recipe.not_yet import KEYS, VALUES

    tables = {"algorithm.advantage.kind": ADVANTAGES, "algorithm.loss.kind": LOSSES, "algorithm.kl.estimator": KLS, "rollout.engine": SAMPLERS}
    known = {key.pattern for key in keys()}
    assert set(tables) | set(VALUES) <= known and not known & set(KEYS)
    for key, table in tables.items():
        assert not set(VALUES.get(key, {})) & set(table), key


def test_texts_name_commands_that_exist() -> None:
    from rftcli.cli.main import COMMANDS

    no_commands = {"recipe"}  # the title of the JSON schema, "rft recipe"
    seen = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = set(re.findall(r"\brft ([a-z][a-z-]+)", node.value))
                assert words <= set(COMMANDS) | no_commands, (path, node.lineno, words)
                seen |= words
    assert {"train", "explain"} <= seen


def test_the_loop_reads_like_the_design() -> None:
    """One screen, no branch on algorithm, engine, modality or tracker."""
    source = (ROOT / "runtime" / "loop.py").read_text()
    run = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "run")
    assert run.end_lineno is not None and run.end_lineno - run.lineno < 45
    words = ("grpo", "rloo", "hf", "vllm", "fake", "wandb", "tensorboard", "cuda", "image")
    assert not [word for word in words if f'"{word}"' in source]


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(ROOT)): count for path in ROOT.rglob("*.py") if (count := len(path.read_text().splitlines())) > 400}
    assert not long


def test_the_linter_has_nothing_to_say() -> None:
    """What `make lint` does."""
    folders = ("rftcli", "tests", "scripts", "benchmarks")
    found = subprocess.run([sys.executable, "-m", "ruff", "check", *folders], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
