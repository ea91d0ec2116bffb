"""What a recipe says wrongly before its data is looked at: options of rules, what cannot be imported, forms that are none.

What a recipe does not use is not imported here either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from rftcli.errors import UsageError
from rftcli.plan.specs import scoring
from rftcli.recipe.load import LoadedRecipe
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Problem
from rftcli.recipe.sections import Recipe
from rftcli.rewards.functions import load_function
from rftcli.rewards.rules import check_options
from rftcli.runtime.engine_options import option_problems
from rftcli.runtime.scorer_checks import scorer_problems


def own_problems(loaded: LoadedRecipe, broken: Collection[str] = (), *, elsewhere: bool = False) -> list[Problem]:
    """All that is below, whichever rules are `broken`. `elsewhere`: the recipe is for a machine with engines of its own. MachineError where a
    package is missing that would have to look."""
    checks = [reward_problems, form_problems, observer_problems, loss_problems, estimator_problems, *([] if elsewhere else [option_problems])]
    return [*(problem for check in checks for problem in check(loaded)), *scorer_problems(loaded, recipe_file(loaded).resolve().parent)]


def reward_problems(loaded: LoadedRecipe) -> list[Problem]:
    """Options that a rule does not take, and functions that cannot be imported."""
    problems = []
    folder = recipe_file(loaded).resolve().parent
    tables: list[tuple[KeyPath, Recipe]] = [(("rewards",), loaded.recipe)]
    if loaded.recipe.eval.rewards is not None:
        tables.append((("eval", "rewards"), scoring(loaded.recipe)))
    places = [((*key, label), entry) for key, recipe in tables for label, entry in recipe.rewards.items()]
    for place, entry in places:
        if not isinstance(entry.combine, str):
            from rftcli.rewards.combine import GROUP_RECORD

            try:
                load_function(entry.combine.python, entry.combine.options, [folder], record=GROUP_RECORD)
            except UsageError as error:
                problems.append(loaded.problem(format_path((*place, "combine", "python")), error.message, hint=error.hint))
        for index, part in enumerate(entry.parts):
            where = format_path((*place, "parts", index))
            if part.rule is not None:
                problems += [loaded.problem(f"{where}.options", text) for text in check_options(part.rule, part.options)]
            elif part.python is not None:
                try:
                    load_function(part.python, part.options, [folder])
                except UsageError as error:
                    problems.append(loaded.problem(f"{where}.python", error.message, hint=error.hint))
    return problems


def form_problems(loaded: LoadedRecipe) -> list[Problem]:
    """A regular expression or a schema that is none. MachineError where the package that reads it is missing."""
    form = loaded.recipe.rollout.structured
    if form is None:
        return []
    from rftcli.engines import grammar

    text = grammar.problem(form.model_dump(exclude_none=True))
    if text is None:
        return []
    key = "regex" if form.regex is not None else "json_schema"
    return [loaded.problem(f"rollout.structured.{key}", f"not a form that can be sampled: {text}", hint=f"`rft explain rollout.structured.{key}`")]


def observer_problems(loaded: LoadedRecipe) -> list[Problem]:
    """An observer of the user's own that cannot be imported."""
    if loaded.recipe.track.python is None:
        return []
    from rftcli.observe.own import observer_class

    try:
        observer_class(loaded.recipe.track.python, str(recipe_file(loaded).resolve().parent))
    except UsageError as error:
        return [loaded.problem("track.python", error.message, hint=error.hint)]
    return []


def loss_problems(loaded: LoadedRecipe) -> list[Problem]:
    """A policy loss of the user's own that cannot be imported or called."""
    from rftcli.runtime.own_loss import load_loss

    section = loaded.recipe.algorithm.loss
    return _own_problems(loaded, "algorithm.loss.python", section.python, lambda target, folder: load_loss(target, section.options, [folder]))


def estimator_problems(loaded: LoadedRecipe) -> list[Problem]:
    """An estimator of the user's own that cannot be imported or called."""
    from rftcli.runtime.own_estimator import load_estimator

    section = loaded.recipe.algorithm.advantage
    where = "algorithm.advantage.python"
    return _own_problems(loaded, where, section.python, lambda target, folder: load_estimator(target, section.options, [folder]))


def _own_problems(loaded: LoadedRecipe, path: str, target: str | None, load: Callable[[str, Path], object]) -> list[Problem]:
    if target is None:
        return []
    try:
        load(target, recipe_file(loaded).resolve().parent)
    except UsageError as error:
        return [loaded.problem(path, error.message, hint=error.hint)]
    return []


def recipe_file(loaded: LoadedRecipe) -> Path:
    assert loaded.path is not None, "recipes of commands are files"
    return loaded.path
