"""From a recipe on disk to a plan for this machine: load, check, look at the data and the model's files, compile. No torch, nothing started.

Every problem found on the way is shown at its place in the recipe, all at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcli.algo import batchmath
from rftcli.builtin import builtin_path
from rftcli.errors import MachineError, UsageError
from rftcli.plan.compile import CompileError, compile_plan, data_specs, reward_parts
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan, plan_from_json
from rftcli.probe import data as data_probe
from rftcli.probe.machine import machine_facts
from rftcli.probe.model import model_facts
from rftcli.recipe.layers import shipped_recipes
from rftcli.recipe.load import LoadedRecipe, load_recipe
from rftcli.recipe.paths import format_path
from rftcli.recipe.problems import Problem
from rftcli.rewards.functions import load_function
from rftcli.rewards.rules import RULES, check_options, needs_reference, require_package

ROWS_LOOKED_AT = 1000
"""Rows that `validate-recipe` reads of every set; a run reads them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`loaded` is None when a finished plan was given."""

    plan: Plan
    loaded: LoadedRecipe | None
    data: data_probe.DataFacts | None
    machine: MachineFacts
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What `validate-recipe` found out without a machine in mind."""

    summary: str
    warnings: tuple[str, ...]


def recipe_path(given: Path) -> Path:
    """The file that was meant: a path as it is, or the name of a shipped recipe. UsageError when there is no such recipe."""
    if given.exists() or given.suffix or len(given.parts) > 1:
        return given
    names = {path.stem: path for path in sorted(shipped_recipes().glob("*.yaml"))}
    if str(given) not in names:
        close = difflib.get_close_matches(str(given), names, n=1)
        meant = f"; did you mean `{close[0]}`?" if close else ""
        raise UsageError(f"there is no file `{given}` and no shipped recipe of that name{meant}", hint=f"shipped recipes: {', '.join(names)}")
    return names[str(given)]


def load(given: Path, sets: Sequence[str]) -> LoadedRecipe:
    """The recipe, schema and cross-field rules checked. RecipeError with every problem."""
    rules = {name: tuple(rule.options) for name, rule in RULES.items()}
    loaded = load_recipe(recipe_path(given), sets=list(sets), known_rules=rules)
    loaded.raise_problems(_reward_problems(loaded))
    for parts in reward_parts(loaded.recipe).values():
        for part in parts:
            if part.kind == "rule":
                require_package(part.target)
    return loaded


def prepare(given: Path, sets: Sequence[str], *, ranks: int | None, gpus: int | None) -> Prepared:
    """A plan for this machine. `given` is a recipe, the name of a shipped one, or a plan.json."""
    machine = _machine(ranks, gpus)
    if given.suffix == ".json":
        return _prepared_plan(given, sets, machine, ranks, gpus)
    loaded = load(given, sets)
    facts = Facts(machine=machine, model=_model(loaded), ranks=_count(machine, ranks, gpus))
    scanned, problems, warnings = _scan(loaded, first=None)
    rows = sum(one.rows for one in scanned.sets if one.name in {spec.name for spec in data_specs(loaded.recipe)[0]})
    try:
        plan = _compile(loaded, Facts(machine=machine, model=facts.model, ranks=facts.ranks, train_rows=rows))
    except CompileError as error:
        loaded.raise_problems([*problems, *(_placed(loaded, p) for p in error.problems)])
        raise
    loaded.raise_problems(problems)
    return Prepared(plan=plan, loaded=loaded, data=scanned, machine=machine, warnings=(*warnings, *_few_prompts(plan, rows)))


def validate(given: Path, sets: Sequence[str], *, ranks: int | None, gpus: int | None) -> Checked:
    """Everything that can be said without starting anything; the batch for `ranks` if given, else for which rank counts it works."""
    loaded = load(given, sets)
    recipe = loaded.recipe
    _, problems, warnings = _scan(loaded, first=ROWS_LOOKED_AT)
    known = ranks or gpus
    refusal = batchmath.refusal(recipe.batch.prompts_per_step, recipe.batch.updates_per_step, known)
    if refusal is not None:
        problems.append(loaded.problem("batch.prompts_per_step", refusal))
    loaded.raise_problems(problems)
    fitting = batchmath.valid_ranks(recipe.batch.prompts_per_step, recipe.batch.updates_per_step, 1024)
    return Checked(summary=f"({recipe.batch.prompts_per_step} prompts a step run on {_listed(fitting)} ranks)", warnings=tuple(warnings))


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... {numbers[-1]}"


def _machine(ranks: int | None, gpus: int | None) -> MachineFacts:
    if ranks is not None and gpus is not None:
        raise UsageError("--ranks is for the CPU and --gpus for GPUs: give one of them")
    machine = machine_facts(use_gpus=ranks is None)
    if gpus is not None and machine.gpus < gpus:
        raise MachineError(f"--gpus {gpus}, but this machine has {machine.gpus}", hint="`nvidia-smi` lists them; --ranks N runs on the CPU")
    return machine


def _count(machine: MachineFacts, ranks: int | None, gpus: int | None) -> int:
    return ranks or gpus or machine.gpus or 1


def _prepared_plan(given: Path, sets: Sequence[str], machine: MachineFacts, ranks: int | None, gpus: int | None) -> Prepared:
    if sets:
        raise UsageError("--set changes a recipe; a plan is finished", hint="`rft plan RECIPE --set ... --out plan.json` makes another one")
    try:
        plan = plan_from_json(given.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{given} is not a plan: {error}", hint="`rft plan RECIPE --out plan.json` writes one") from error
    wanted = _count(machine, ranks, gpus)
    if plan.world.device == "cuda" and machine.gpus < plan.world.ranks:
        raise MachineError(
            f"the plan is for {plan.world.ranks} GPUs, this machine has {machine.gpus}", hint="plan again on this machine: `rft plan RECIPE`"
        )
    if (ranks or gpus) and wanted != plan.world.ranks:
        raise UsageError(
            f"the plan is for {plan.world.ranks} ranks, {wanted} were asked for", hint="plan again: `rft plan RECIPE --ranks N --out ...`"
        )
    return Prepared(plan=plan, loaded=None, data=None, machine=machine, warnings=())


def resolved_model(path: str) -> str:
    """`builtin:` names become paths; everything else stays."""
    return str(builtin_path(path.removeprefix("builtin:"))) if path.startswith("builtin:") else path


def _path(loaded: LoadedRecipe) -> Path:
    assert loaded.path is not None, "recipes of commands are files"
    return loaded.path


def _model(loaded: LoadedRecipe) -> ModelFacts:
    return model_facts(resolved_model(loaded.recipe.models.policy.path))


def _compile(loaded: LoadedRecipe, facts: Facts) -> Plan:
    recipe = loaded.recipe
    reference = recipe.models.reference.from_
    return compile_plan(
        recipe,
        facts,
        name=recipe.name or _path(loaded).stem,
        search_path=str(_path(loaded).resolve().parent),
        policy_path=resolved_model(recipe.models.policy.path),
        reference_path=None if reference == "policy" else resolved_model(reference),
    )


def _scan(loaded: LoadedRecipe, *, first: int | None) -> tuple[data_probe.DataFacts, list[Problem], list[str]]:
    """Facts of every set, labels without a reward entry as problems, reward entries without rows as warnings."""
    recipe = loaded.recipe
    folder = _path(loaded).resolve().parent
    train, held_out = data_specs(recipe)
    facts = data_probe.scan([*train, *held_out], [folder], first=first)
    needing = [
        label
        for label, parts in reward_parts(recipe).items()
        if any(part.kind == "rule" and needs_reference(part.target, part.options) for part in parts)
    ]
    problems, warnings = [], []
    for found in data_probe.label_problems(facts, list(recipe.rewards), needing):
        if found.error:
            problems.append(loaded.problem("rewards", found.message, hint=found.hint))
        else:
            warnings.append(found.message)
    return facts, problems, warnings


def _reward_problems(loaded: LoadedRecipe) -> list[Problem]:
    """Options that a rule does not take, and functions that cannot be imported."""
    problems = []
    folder = _path(loaded).resolve().parent
    for label, entry in loaded.recipe.rewards.items():
        for index, part in enumerate(entry.parts):
            where = format_path(("rewards", label, "parts", index))
            if part.rule is not None:
                problems += [loaded.problem(f"{where}.options", text) for text in check_options(part.rule, part.options)]
            elif part.python is not None:
                try:
                    load_function(part.python, part.options, [folder])
                except UsageError as error:
                    problems.append(loaded.problem(f"{where}.python", error.message, hint=error.hint))
    return problems


def _placed(loaded: LoadedRecipe, problem: Any) -> Problem:
    return loaded.problem(problem.path, problem.message, reason=problem.reason, hint=problem.hint)


def _few_prompts(plan: Plan, rows: int) -> tuple[str, ...]:
    need = plan.batch.prompts_per_step
    return (f"the training data has {rows} rows, a step draws {need}: rows repeat within a step",) if rows < need else ()
