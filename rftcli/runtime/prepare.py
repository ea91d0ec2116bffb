"""From a recipe on disk to a plan for this machine: load, check, look at the data and the model's files, compile. No torch, nothing started.

Every problem found on the way is shown at its place in the recipe, all at once. Checking a recipe needs no plan: what makes one is imported for it.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rftcli.algo import batchmath
from rftcli.data.once import Tables
from rftcli.errors import MachineError, UsageError
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts, ScorerFacts
from rftcli.plan.specs import reward_parts, scoring
from rftcli.probe.model import model_facts, tokenizer_commit
from rftcli.recipe.layers import shipped_recipes
from rftcli.recipe.load import Further, LoadedRecipe, load_recipe
from rftcli.recipe.paths import KeyPath
from rftcli.recipe.problems import Problem
from rftcli.recipe.written import escaped, written_recipe
from rftcli.rewards.rules import RULES, require_package
from rftcli.runtime import checks
from rftcli.runtime.early_checks import check_positions, few_prompts, fitting_ranks, imitated, only_files
from rftcli.runtime.environment import resolved_model
from rftcli.runtime.naming import run_name
from rftcli.runtime.packages import require_packages
from rftcli.runtime.recipe_checks import own_problems, recipe_file
from rftcli.runtime.scan import STREAMED_ROWS_LOOKED_AT, Scan, scan_sets
from rftcli.runtime.scorer_checks import scorer_facts, scorer_warnings

if TYPE_CHECKING:
    from rftcli.plan.plan import Plan
    from rftcli.probe.lengths import LengthFacts
    from rftcli.probe.machine import OtherMachine

ROWS_LOOKED_AT = 1000
"""Rows that `validate-recipe` reads of every set; a run reads them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`loaded` is None when a finished plan was given."""

    plan: Plan
    loaded: LoadedRecipe | None
    data: Scan | None
    machine: MachineFacts
    warnings: tuple[str, ...]
    lengths: tuple[LengthFacts, ...] = ()
    """Prompts in tokens, training sets first."""
    sets: tuple[str, ...] = ()
    """As given on the command line."""


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
    if (given / "state.json").is_file():
        hint = f"`rft resume {shlex.quote(str(given))}` goes on with it; its recipe is {given / 'recipe.yaml'}"
        raise UsageError(f"{given} is a run directory, not a recipe", hint=hint)
    if given.exists() or given.suffix or len(given.parts) > 1:
        return given
    close = difflib.get_close_matches(str(given), names, n=1)
    meant = f"; did you mean `{close[0]}`?" if close else ""
    hint = f"shipped recipes: {', '.join(names)}"
    raise UsageError(f"there is no file or directory `{given}` and no shipped recipe of that name{meant}", hint=hint)


def load(
    given: Path, sets: Sequence[str], *, text: str | None = None, elsewhere: bool = False, further: Further | None = None
) -> LoadedRecipe:
    """The recipe, schema and cross-field rules checked. RecipeError with every problem. `text` takes the place of the file's own. `elsewhere`: it is
    for a machine of its own, where other packages may be installed. `further`: what else is looked at where rules are broken."""
    rules = {name: tuple(rule.options) for name, rule in RULES.items()}
    path = recipe_path(given) if text is None else given
    look = partial(own_problems, elsewhere=elsewhere) if further is None else further
    loaded = load_recipe(path, sets=list(sets), known_rules=rules, text=text, further=look)
    if own_problems(loaded, elsewhere=elsewhere):
        loaded.raise_problems(look(loaded, frozenset()))  # the same and what else there is
    for parts in (*reward_parts(loaded.recipe).values(), *reward_parts(scoring(loaded.recipe)).values()):
        for part in parts:
            if part.kind == "rule":
                require_package(part.target)
    if not elsewhere:
        require_packages(loaded.recipe)
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    """Ranks on several machines, or of a launcher that has started them already."""

    ranks: int
    nodes: int
    per_node: int


def prepare(
    given: Path, sets: Sequence[str], *, ranks: int | None, gpus: int | None, several: Several | None = None, text: str | None = None,
    other: OtherMachine | None = None,
) -> Prepared:
    """A plan for this machine, or for another one. `given` is a recipe, the name of a shipped one, or a plan.json."""
    from rftcli.probe.machine import left_alone

    machine = machine_at_hand(ranks, gpus, several) if other is None else other.facts
    if other is not None:
        several = Several(ranks=other.each * other.nodes, nodes=other.nodes, per_node=other.each)
    if given.suffix == ".json":
        return _prepared_plan(given, sets, machine, ranks, gpus, several)
    loaded = load(given, sets, text=text, elsewhere=other is not None)
    problems: list[Problem] = []
    tables = Tables()
    scan, warnings = scan_sets(loaded, problems, tables, first=None)
    warnings += left_alone(machine)
    try:
        policy = _model(loaded, "models.policy.path", loaded.recipe.models.policy.path, problems, loaded.recipe.models.policy.revision)
        reference = _reference(loaded, problems)
        critic = _critic(loaded, problems)
        teacher = _teacher(loaded, problems)
        scorers = scorer_facts(loaded, problems, os.environ)
        tokenizer = _tokenizer_and_adapter(loaded, problems)
    except MachineError:
        loaded.raise_problems(problems)  # what is wrong here and now comes before a hub that does not answer
        raise
    train_rows, lengths = scan.train_rows, ()
    if not problems:  # what cannot be read cannot be measured
        folder = recipe_file(loaded).resolve().parent
        measured, longer = checks.check_lengths(
            loaded, policy, tokenizer, folder, problems, tables, first_streamed=STREAMED_ROWS_LOOKED_AT, teacher=teacher
        )
        warnings += longer + checks.check_rows(loaded, folder, problems, tables, first=None, first_streamed=STREAMED_ROWS_LOOKED_AT)
        lengths = (*measured.train, *measured.eval)
        if train_rows is not None and not problems:
            train_rows = sum(one.kept for one in measured.train)
    here = Several(ranks=ranks or gpus or machine.gpus or 1, nodes=1, per_node=1) if several is None else several
    facts = Facts(machine=machine, model=policy, ranks=here.ranks, nodes=here.nodes, train_rows=train_rows, tokenizer_revision=tokenizer)
    plan = _compile(loaded, facts, reference, critic, problems, scorers, teacher)
    loaded.raise_problems(problems)
    assert plan is not None, "a recipe that cannot be compiled has a problem"
    warnings += [*few_prompts(plan, train_rows), *imitated(plan, machine)]
    return Prepared(plan=plan, loaded=loaded, data=scan, machine=machine, warnings=tuple(warnings), lengths=lengths, sets=tuple(sets))


def validate(given: Path, sets: Sequence[str], *, ranks: int | None, gpus: int | None) -> Checked:
    """Everything that can be said without starting anything; the batch for `ranks` if given, else for which rank counts it works."""
    _refuse_both(ranks, gpus)
    loaded = load(given, sets, further=_all_further)
    recipe = loaded.recipe
    problems: list[Problem] = []
    if recipe.models.policy.path.startswith(("builtin:", "/")):  # a hub id is not asked for: this command needs no network
        check_positions(loaded, _model(loaded, "models.policy.path", recipe.models.policy.path, problems), problems)
    scorer_facts(loaded, problems, os.environ, hub=False)
    tables = Tables()
    _, warnings = scan_sets(loaded, problems, tables, first=ROWS_LOOKED_AT)
    warnings += scorer_warnings(loaded)
    if not problems:
        folder = recipe_file(loaded).resolve().parent
        warnings += checks.check_rows(loaded, folder, problems, tables, first=ROWS_LOOKED_AT, first_streamed=ROWS_LOOKED_AT)
    refusal = batchmath.refusal(recipe.batch.prompts_per_step, recipe.batch.updates_per_step, ranks or gpus)
    if refusal is not None:
        problems.append(loaded.problem("batch.prompts_per_step", refusal, hint="`rft explain batch.prompts_per_step`"))
    elif ranks or gpus:
        batch = recipe.batch
        refusal = batchmath.rollouts_refusal(batch.prompts_per_step, batch.updates_per_step, batch.rollouts_per_update, ranks or gpus)
        if refusal is not None:
            problems.append(loaded.problem("batch.rollouts_per_update", refusal, hint="`rft explain batch.rollouts_per_update`"))
    loaded.raise_problems(problems)
    return Checked(summary=f"({recipe.batch.prompts_per_step} prompts a step run on {fitting_ranks(recipe)} ranks)", warnings=tuple(warnings))


def _all_further(loaded: LoadedRecipe, broken: Collection[str]) -> list[Problem]:
    """Functions that are not there, and what files of data say, unless the rules about data are broken. A hub is not waited for."""
    problems = own_problems(loaded)
    sound = not any(code.startswith("data-") or code in ("label-without-reward", "reference-pattern", "supervised-source") for code in broken)
    if sound and only_files(loaded):
        scan_sets(loaded, problems, Tables(), first=ROWS_LOOKED_AT)
    return problems


def machine_at_hand(ranks: int | None, gpus: int | None, several: Several | None = None) -> MachineFacts:
    """This machine, without its GPUs when `ranks` asks for the CPU. MachineError when it has fewer than `gpus`."""
    from rftcli.probe.machine import machine_facts

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
    from rftcli.plan.plan import plan_from_json

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


def _model(loaded: LoadedRecipe, key: str, path: str, problems: list[Problem], revision: str | None = None) -> ModelFacts:
    """Facts of the model at a key; when there is none, a problem at its place, and facts that say nothing."""
    try:
        return model_facts(resolved_model(path), revision)
    except UsageError as error:
        problems.append(loaded.problem(key, error.message, hint=error.hint))
        return ModelFacts(path=path)


def _reference(loaded: LoadedRecipe, problems: list[Problem]) -> ModelFacts | None:
    """Facts of a reference that is not the policy; None where it is, or where nothing needs one."""
    recipe = loaded.recipe
    if recipe.models.reference.from_ == "policy" or recipe.algorithm.kl.coefficient == 0.0:
        return None
    return _model(loaded, "models.reference.from", recipe.models.reference.from_, problems)


def _critic(loaded: LoadedRecipe, problems: list[Problem]) -> ModelFacts | None:
    """Facts of a critic that does not start from the policy; None where it does, or where there is none."""
    critic = loaded.recipe.models.critic
    return None if critic is None or critic.from_ == "policy" else _model(loaded, "models.critic.from", critic.from_, problems)


def _teacher(loaded: LoadedRecipe, problems: list[Problem]) -> ModelFacts | None:
    """Facts of a teacher that is loaded here; None where there is none, or a server has it."""
    teacher = loaded.recipe.models.teacher
    if teacher is None or teacher.path is None:
        return None
    return _model(loaded, "models.teacher.path", teacher.path, problems, teacher.revision)


def _tokenizer_and_adapter(loaded: LoadedRecipe, problems: list[Problem]) -> str | None:
    """The commit of a tokenizer of its own, if it lies on the hub. An adapter to go on from has to be one."""
    policy = loaded.recipe.models.policy
    start = None if policy.lora is None else policy.lora.start_from
    if start is not None and start.startswith("/") and not (Path(start) / "adapter_config.json").is_file():
        text = f"{start} holds no adapter (no adapter_config.json)"
        problems.append(loaded.problem("models.policy.lora.start_from", text, hint="a checkpoint's `adapter/`, or what peft's save_pretrained wrote"))
    if policy.tokenizer is None:
        return None
    try:
        return tokenizer_commit(resolved_model(policy.tokenizer))
    except UsageError as error:
        problems.append(loaded.problem("models.policy.tokenizer", error.message, hint=error.hint))
        return None


def _compile(
    loaded: LoadedRecipe, facts: Facts, reference: ModelFacts | None, critic: ModelFacts | None, problems: list[Problem],
    scorers: Mapping[str, ScorerFacts],
    teacher: ModelFacts | None,
) -> Plan | None:  # fmt: skip
    """The plan, with `${VAR}` in its texts; None with the reasons added to `problems`."""
    from rftcli.plan.compile import compile_plan
    from rftcli.plan.compile_problems import CompileError

    try:
        return compile_plan(
            written_recipe(loaded),
            facts,
            name=run_name(loaded.recipe, recipe_file(loaded).stem),
            search_path=escaped(str(recipe_file(loaded).resolve().parent)),
            policy_path=_written_path(loaded, ("models", "policy", "path"), facts.model),
            reference_path=None if reference is None else _written_path(loaded, ("models", "reference", "from"), reference),
            critic=None if critic is None else replace(critic, path=_written_path(loaded, ("models", "critic", "from"), critic)),
            scorers=scorers,
            teacher=None if teacher is None else replace(teacher, path=_written_path(loaded, ("models", "teacher", "path"), teacher)),
            reference_revision=None if reference is None else reference.revision,
            reference_facts=reference,
        )
    except CompileError as error:
        problems += [loaded.problem(found.path, found.message, reason=found.reason, hint=found.hint) for found in error.problems]
        return None


def _written_path(loaded: LoadedRecipe, key: KeyPath, facts: ModelFacts) -> str:
    """Where a model lies: as it was written if that holds a reference, else what it was resolved to."""
    kept = loaded.unexpanded.get(key)
    return escaped(facts.path) if kept is None else kept.text


