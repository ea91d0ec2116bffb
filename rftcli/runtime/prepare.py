"""From a recipe on disk to a plan for this machine: load, check, look at the data and the model's files, compile. No torch, nothing started.

Every problem found on the way is shown at its place in the recipe, all at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rftcli.algo import batchmath
from rftcli.builtin import builtin_path
from rftcli.data.spec import DataSpec
from rftcli.errors import MachineError, UsageError
from rftcli.observe.own import observer_class
from rftcli.plan.compile import compile_plan
from rftcli.plan.compile_data import data_specs, reward_parts
from rftcli.plan.compile_problems import CompileError
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.plan import Plan, plan_from_json
from rftcli.probe import data as data_probe
from rftcli.probe.machine import machine_facts
from rftcli.probe.model import model_facts
from rftcli.recipe.layers import shipped_recipes
from rftcli.recipe.load import LoadedRecipe, load_recipe
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Problem
from rftcli.recipe.sections import DataSource, Recipe
from rftcli.rewards.functions import load_function
from rftcli.rewards.rules import RULES, check_options, needs_reference, require_package

ROWS_LOOKED_AT = 1000
"""Rows that `validate-recipe` reads of every set; a run reads them all."""
_REFERENCE = re.compile(r"\$\{\w+\}")
"""What `data.files.locate` expands: no defaults, and no `$${`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What is in the data; sets that cannot be read are left out."""

    train: data_probe.DataFacts
    eval: data_probe.DataFacts

    @property
    def train_rows(self) -> int:
        return sum(one.rows for one in self.train.sets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`loaded` is None when a finished plan was given."""

    plan: Plan
    loaded: LoadedRecipe | None
    data: Scan | None
    machine: MachineFacts
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What `validate-recipe` found out without a machine in mind."""

    summary: str
    warnings: tuple[str, ...]


def recipe_path(given: Path) -> Path:
    """The file that was meant: a path as it is, or the name of a shipped recipe. UsageError when there is no such recipe."""
    names = {path.stem: path for path in sorted(shipped_recipes().glob("*.yaml"))}
    if not given.is_file() and str(given) in names:
        return names[str(given)]
    if given.exists() or given.suffix or len(given.parts) > 1:
        return given
    close = difflib.get_close_matches(str(given), names, n=1)
    meant = f"; did you mean `{close[0]}`?" if close else ""
    raise UsageError(f"there is no file `{given}` and no shipped recipe of that name{meant}", hint=f"shipped recipes: {', '.join(names)}")


def load(given: Path, sets: Sequence[str]) -> LoadedRecipe:
    """The recipe, schema and cross-field rules checked. RecipeError with every problem."""
    rules = {name: tuple(rule.options) for name, rule in RULES.items()}
    loaded = load_recipe(recipe_path(given), sets=list(sets), known_rules=rules)
    loaded.raise_problems([*_reward_problems(loaded), *_observer_problems(loaded)])
    for parts in reward_parts(loaded.recipe).values():
        for part in parts:
            if part.kind == "rule":
                require_package(part.target)
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    """Ranks on several machines, or of a launcher that has started them already."""

    ranks: int
    nodes: int
    per_node: int


def prepare(given: Path, sets: Sequence[str], *, ranks: int | None, gpus: int | None, several: Several | None = None) -> Prepared:
    """A plan for this machine. `given` is a recipe, the name of a shipped one, or a plan.json."""
    machine = machine_at_hand(ranks, gpus, several)
    if given.suffix == ".json":
        return _prepared_plan(given, sets, machine, ranks, gpus, several)
    loaded = load(given, sets)
    problems: list[Problem] = []
    scan, warnings = _scan(loaded, problems, first=None)
    try:
        policy = _model(loaded, "models.policy.path", loaded.recipe.models.policy.path, problems)
        reference = _reference(loaded, problems)
    except MachineError:
        loaded.raise_problems(problems)  # what is wrong here and now comes before a hub that does not answer
        raise
    here = Several(ranks=ranks or gpus or machine.gpus or 1, nodes=1, per_node=1) if several is None else several
    facts = Facts(machine=machine, model=policy, ranks=here.ranks, nodes=here.nodes, train_rows=scan.train_rows)
    plan = _compile(loaded, facts, reference, problems)
    loaded.raise_problems(problems)
    assert plan is not None, "a recipe that cannot be compiled has a problem"
    return Prepared(plan=plan, loaded=loaded, data=scan, machine=machine, warnings=(*warnings, *_few_prompts(plan, scan.train_rows)))


def validate(given: Path, sets: Sequence[str], *, ranks: int | None, gpus: int | None) -> Checked:
    """Everything that can be said without starting anything; the batch for `ranks` if given, else for which rank counts it works."""
    _refuse_both(ranks, gpus)
    loaded = load(given, sets)
    recipe = loaded.recipe
    problems: list[Problem] = []
    if recipe.models.policy.path.startswith(("builtin:", "/")):  # a hub id is not asked for: this command needs no network
        _model(loaded, "models.policy.path", recipe.models.policy.path, problems)
    _, warnings = _scan(loaded, problems, first=ROWS_LOOKED_AT)
    refusal = batchmath.refusal(recipe.batch.prompts_per_step, recipe.batch.updates_per_step, ranks or gpus)
    if refusal is not None:
        problems.append(loaded.problem("batch.prompts_per_step", refusal, hint="`rft explain batch.prompts_per_step`"))
    loaded.raise_problems(problems)
    fitting = batchmath.valid_ranks(recipe.batch.prompts_per_step, recipe.batch.updates_per_step, 1024)
    return Checked(summary=f"({recipe.batch.prompts_per_step} prompts a step run on {_listed(fitting)} ranks)", warnings=tuple(warnings))


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... {numbers[-1]}"


def machine_at_hand(ranks: int | None, gpus: int | None, several: Several | None = None) -> MachineFacts:
    """This machine, without its GPUs when `ranks` asks for the CPU. MachineError when it has fewer than `gpus`."""
    _refuse_both(ranks, gpus)
    machine = machine_facts(use_gpus=ranks is None)
    if several is not None and 0 < machine.gpus < several.per_node:
        hint = "one rank a GPU; --ranks N runs on the CPU"
        raise MachineError(f"{several.per_node} ranks a node, but this machine has {machine.gpus} GPUs", hint=hint)
    if gpus is not None and machine.gpus < gpus:
        raise MachineError(f"--gpus {gpus}, but this machine has {machine.gpus}", hint="`nvidia-smi` lists them; --ranks N runs on the CPU")
    return machine


def _refuse_both(ranks: int | None, gpus: int | None) -> None:
    if ranks is not None and gpus is not None:
        raise UsageError("--ranks is for the CPU and --gpus for GPUs: give one of them")


def _prepared_plan(
    given: Path, sets: Sequence[str], machine: MachineFacts, ranks: int | None, gpus: int | None, several: Several | None
) -> Prepared:
    if sets:
        raise UsageError("--set changes a recipe; a plan is finished", hint="`rft plan RECIPE --set ... --out plan.json` makes another one")
    try:
        plan = plan_from_json(given.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{given} is not a plan: {error}", hint="`rft plan RECIPE --out plan.json` writes one") from error
    asked = plan.world.device if (ranks or gpus) is None else "cpu" if gpus is None else "cuda"
    if (ranks or gpus or plan.world.ranks, asked) != (plan.world.ranks, plan.world.device):
        raise UsageError(
            f"the plan is for {plan.world.ranks} x {plan.world.device}, {ranks or gpus} x {asked} were asked for",
            hint="plan again: `rft plan RECIPE --ranks N --out ...`",
        )
    nodes = 1 if several is None else several.nodes
    if nodes != plan.world.nodes or (several is not None and several.ranks != plan.world.ranks):
        raise UsageError(
            f"the plan is for {plan.world.ranks} ranks on {plan.world.nodes} nodes", hint="plan again with the same --nodes or --hostfile"
        )
    if plan.world.device == "cuda" and machine.gpus < plan.world.ranks // nodes:
        raise MachineError(
            f"the plan is for {plan.world.ranks} GPUs, this machine has {machine.gpus}", hint="plan again on this machine: `rft plan RECIPE`"
        )
    return Prepared(plan=plan, loaded=None, data=None, machine=machine, warnings=())


def resolved_model(path: str) -> str:
    """`builtin:` names become paths; everything else stays."""
    return str(builtin_path(path.removeprefix("builtin:"))) if path.startswith("builtin:") else path


def _path(loaded: LoadedRecipe) -> Path:
    assert loaded.path is not None, "recipes of commands are files"
    return loaded.path


def _model(loaded: LoadedRecipe, key: str, path: str, problems: list[Problem]) -> ModelFacts:
    """Facts of the model at a key; when there is none, a problem at its place, and facts that say nothing."""
    try:
        return model_facts(resolved_model(path))
    except UsageError as error:
        problems.append(loaded.problem(key, error.message, hint=error.hint))
        return ModelFacts(path=path)


def _reference(loaded: LoadedRecipe, problems: list[Problem]) -> ModelFacts | None:
    """Facts of a reference that is not the policy; None where it is, or where nothing needs one."""
    recipe = loaded.recipe
    if recipe.models.reference.from_ == "policy" or recipe.algorithm.kl.coefficient == 0.0:
        return None
    return _model(loaded, "models.reference.from", recipe.models.reference.from_, problems)


def _compile(loaded: LoadedRecipe, facts: Facts, reference: ModelFacts | None, problems: list[Problem]) -> Plan | None:
    """The plan; None with the reasons added to `problems`."""
    try:
        return compile_plan(
            with_references(loaded),
            facts,
            name=loaded.recipe.name or _path(loaded).stem,
            search_path=str(_path(loaded).resolve().parent),
            policy_path=facts.model.path,
            reference_path=None if reference is None else reference.path,
        )
    except CompileError as error:
        problems += [loaded.problem(found.path, found.message, reason=found.reason, hint=found.hint) for found in error.problems]
        return None


def with_references(loaded: LoadedRecipe) -> Recipe:
    """The recipe with the paths of its data sets as they were written, `${NAME}` unexpanded: whoever opens the file expands them, so what is kept on
    disk says nothing about the environment, and moves with it."""
    data = loaded.recipe.data
    train = tuple(_as_written(loaded, source, ("data", "train", index)) for index, source in enumerate(data.train))
    held_out = {name: _as_written(loaded, source, ("data", "eval", name)) for name, source in data.eval.items()}
    return loaded.recipe.model_copy(update={"data": data.model_copy(update={"train": train, "eval": held_out})})


def _as_written(loaded: LoadedRecipe, source: DataSource, key: KeyPath) -> DataSource:
    written = loaded.unexpanded.get((*key, "path"))
    if written is None or source.path is None or source.path.startswith("builtin:"):
        return source
    if "$${" in written.text or "${" in _REFERENCE.sub("", written.text):
        return source
    return source.model_copy(update={"path": written.text})


def _scan(loaded: LoadedRecipe, problems: list[Problem], *, first: int | None) -> tuple[Scan, list[str]]:
    """What is in every set, and reward entries without rows as warnings. Sets that cannot be read and labels without a reward entry are problems."""
    recipe = loaded.recipe
    train, held_out = data_specs(with_references(loaded))
    scan = Scan(
        train=_scan_sets(loaded, [(spec, ("data", "train", index)) for index, spec in enumerate(train)], problems, first),
        eval=_scan_sets(loaded, [(spec, ("data", "eval", spec.name)) for spec in held_out], problems, first),
    )
    needing = [
        label
        for label, parts in reward_parts(recipe).items()
        if any(part.kind == "rule" and needs_reference(part.target, part.options) for part in parts)
    ]
    warnings = []
    facts = data_probe.DataFacts(sets=(*scan.train.sets, *scan.eval.sets))
    for found in data_probe.label_problems(facts, list(recipe.rewards), needing):
        if found.error:
            problems.append(loaded.problem("rewards", found.message, hint=found.hint))
        else:
            warnings.append(found.message if found.hint is None else f"{found.message}; {found.hint}")
    return scan, warnings


def _scan_sets(loaded: LoadedRecipe, specs: Sequence[tuple[DataSpec, KeyPath]], problems: list[Problem], first: int | None) -> data_probe.DataFacts:
    folder = _path(loaded).resolve().parent
    sets: list[data_probe.SetFacts] = []
    for spec, key in specs:
        try:
            sets += data_probe.scan([spec], [folder], first=first).sets
        except UsageError as error:
            where = format_path((*key, "python" if spec.path is None else "path"))
            problems.append(loaded.problem(where, error.message, hint=error.hint))
    return data_probe.DataFacts(sets=tuple(sets))


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


def _observer_problems(loaded: LoadedRecipe) -> list[Problem]:
    """An observer of the user's own that cannot be imported."""
    if loaded.recipe.track.python is None:
        return []
    try:
        observer_class(loaded.recipe.track.python, str(_path(loaded).resolve().parent))
    except UsageError as error:
        return [loaded.problem("track.python", error.message, hint=error.hint)]
    return []


def _few_prompts(plan: Plan, rows: int) -> tuple[str, ...]:
    need = plan.batch.prompts_per_step
    return (f"the training data has {rows} rows, a step draws {need}: rows repeat within a step",) if rows < need else ()
