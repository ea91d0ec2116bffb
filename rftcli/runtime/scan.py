"""What is in the sets of a recipe, and whether its rewards can score it. Imports no tokenizer and no rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftcli.data.once import Tables
from rftcli.data.rows import spec_problems
from rftcli.data.spec import DataSpec
from rftcli.errors import UsageError
from rftcli.plan.specs import data_specs, reward_parts, scoring, supervised_data
from rftcli.probe import data as data_probe
from rftcli.recipe.load import LoadedRecipe
from rftcli.recipe.paths import KeyPath, format_path
from rftcli.recipe.problems import Problem
from rftcli.recipe.sections import Recipe
from rftcli.rewards.rules import needs_reference
from rftcli.runtime.early_checks import check_sampled_labels, check_votes
from rftcli.runtime.recipe_checks import recipe_file

STREAMED_ROWS_LOOKED_AT = 10_000
"""Rows of a streamed set that are looked at before a run; the others are checked when they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What is in the data; sets that cannot be read are left out."""

    train: data_probe.DataFacts
    eval: data_probe.DataFacts

    @property
    def train_rows(self) -> int | None:
        """None where a streamed set was not read to its end."""
        return sum(one.rows for one in self.train.sets) if all(one.complete for one in self.train.sets) else None


def scan_sets(loaded: LoadedRecipe, problems: list[Problem], tables: Tables, *, first: int | None) -> tuple[Scan, list[str]]:
    """What is in every set, and reward entries without rows as warnings. Sets that cannot be read and labels without a reward entry are problems."""
    recipe = loaded.recipe
    train, held_out = data_specs(recipe)
    stream = supervised_data(recipe)
    if stream is not None:
        _look_at(loaded, [(stream, ("train", "supervised", "data"))], problems, tables, first)
    scan = Scan(
        train=_look_at(loaded, [(spec, ("data", "train", index)) for index, spec in enumerate(train)], problems, tables, first),
        eval=_look_at(loaded, [(spec, ("data", "eval", spec.name)) for spec in held_out], problems, tables, first),
    )
    warnings: list[str] = []
    if recipe.eval.rewards is None:
        _check_labels(loaded, recipe, "rewards", (*scan.train.sets, *scan.eval.sets), problems, warnings)
    else:
        _check_labels(loaded, recipe, "rewards", scan.train.sets, problems, warnings)
        _check_labels(loaded, scoring(recipe), "eval.rewards", scan.eval.sets, problems, warnings)
    warnings += check_sampled_labels(loaded, scan.train.sets, problems)
    check_votes(loaded, problems)
    return scan, warnings


def _check_labels(
    loaded: LoadedRecipe, recipe: Recipe, table: str, sets: Sequence[data_probe.SetFacts], problems: list[Problem], warnings: list[str]
) -> None:
    """Labels of `sets` against `recipe.rewards`, which stand at the key `table`."""
    needing = [
        label
        for label, parts in reward_parts(recipe).items()
        if any(part.kind == "rule" and needs_reference(part.target, part.options) for part in parts)
    ]
    for found in data_probe.label_problems(data_probe.DataFacts(sets=tuple(sets)), list(recipe.rewards), needing):
        message, hint = found.message.replace("`rewards", f"`{table}"), None if found.hint is None else found.hint.replace("`rewards", f"`{table}")
        if found.error:
            problems.append(loaded.problem(table, message, hint=hint))
        else:
            warnings.append(message if hint is None else f"{message}; {hint}")


def _look_at(
    loaded: LoadedRecipe, specs: Sequence[tuple[DataSpec, KeyPath]], problems: list[Problem], tables: Tables, first: int | None
) -> data_probe.DataFacts:
    folder = recipe_file(loaded).resolve().parent
    sets: list[data_probe.SetFacts] = []
    for spec, key in specs:
        wrong = spec_problems(spec)
        if wrong:
            problems += [loaded.problem(format_path((*key, name)), error.message, hint=error.hint) for name, error in wrong]
            continue
        looked_at = STREAMED_ROWS_LOOKED_AT if spec.streaming and first is None else first
        try:
            sets += data_probe.scan([spec], [folder], first=looked_at, tables=tables).sets
        except UsageError as error:
            where = format_path((*key, "python" if spec.path is None else "path"))
            problems.append(loaded.problem(where, error.message, hint=error.hint))
    return data_probe.DataFacts(sets=tuple(sets))
