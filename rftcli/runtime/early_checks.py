"""What `validate-recipe` and `plan` both see early: labels against the rows that were read, lengths against the model's positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rftcli.algo.batchmath import valid_ranks
from rftcli.plan.compile_lengths import check_eval_lengths, check_lengths, with_length
from rftcli.plan.compile_problems import PlanProblem
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.plan.specs import reward_parts, scoring
from rftcli.probe.data import SetFacts
from rftcli.recipe.load import LoadedRecipe
from rftcli.recipe.names import did_you_mean
from rftcli.recipe.problems import Problem
from rftcli.recipe.sections import Recipe

if TYPE_CHECKING:
    from rftcli.plan.plan import Plan


def only_files(loaded: LoadedRecipe) -> bool:
    """Whether all data lie on this machine, where a look takes no time."""
    recipe = loaded.recipe
    sources = [*recipe.data.train, *recipe.data.eval.values(), *([recipe.train.supervised.data] if recipe.train.supervised is not None else [])]
    return all(source.path is not None and source.path.startswith(("/", "builtin:")) for source in sources)


def check_sampled_labels(loaded: LoadedRecipe, sets: Sequence[SetFacts], problems: list[Problem]) -> list[str]:
    """Labels of `rollout.by_label` that no training row has: problems where every row was read, else warnings, which are returned. `sets`: the
    training sets; one that could not be read is missing, and then nothing is said."""
    read = {label for one in sets for label in one.labels}
    absent = [label for label in loaded.recipe.rollout.by_label if label not in read]
    if not absent or not read or len(sets) < len(loaded.recipe.data.train):
        return []
    if all(one.complete for one in sets):
        for label in absent:
            hint = f"labels of the training sets: {', '.join(sorted(read))}"
            message = f"no training row has the label `{label}`"
            reason = did_you_mean(label, read)
            problems.append(loaded.problem(f"rollout.by_label.{label}", message, reason=reason, hint=hint))
        return []
    rows, have = sum(one.rows for one in sets), ", ".join(sorted(read))
    return [f"none of the first {rows} training rows has the label `{label}` of rollout.by_label; they have {have}" for label in absent]


def check_positions(loaded: LoadedRecipe, policy: ModelFacts, problems: list[Problem]) -> None:
    """Prompts and completions that are together longer than the model's positions, as `compile_plan` refuses them, without a machine in mind."""
    facts, found = Facts(machine=MachineFacts(cores=1, memory_gib=1.0), model=policy, ranks=1), list[PlanProblem]()
    if loaded.recipe.rollout.max_new_tokens == "auto" and policy.max_positions is None:
        return  # the plan says so
    recipe = with_length(loaded.recipe, facts, found, [])
    check_lengths(recipe, facts, found, [])
    check_eval_lengths(recipe, facts, found)
    problems += [loaded.problem(one.path, one.message, reason=one.reason, hint=one.hint) for one in found]


def check_votes(loaded: LoadedRecipe, problems: list[Problem]) -> None:
    """Votes need a rule that reads an answer."""
    if not loaded.recipe.eval.vote_k:
        return
    from rftcli.rewards.answers import READERS, reads_answers

    if not any(map(reads_answers, reward_parts(scoring(loaded.recipe)).values())):
        hint = f"rules that do: {', '.join(READERS)}"
        problems.append(loaded.problem("eval.vote_k", "no reward has a rule that reads an answer out of a completion", hint=hint))


def few_prompts(plan: Plan, rows: int | None) -> tuple[str, ...]:
    need = plan.batch.prompts_per_step
    if rows is None:
        return ()
    return (f"the training data has {rows} row{'s' if rows != 1 else ''}, a step draws {need}: rows repeat within a step",) if rows < need else ()


def imitated(plan: Plan, machine: MachineFacts) -> tuple[str, ...]:
    """A policy in a number type that the machine lacks."""
    if plan.policy.dtype != "bfloat16" or (machine.has_bfloat16 if machine.gpus else machine.cpu_bfloat16):
        return ()
    what = machine.gpu_name if machine.gpus else "this CPU, without AVX-512 and AMX,"
    return (f"models.policy.dtype: {what} only imitates bfloat16, many times slower than it computes in float32: leave the key out",)


MOST_RANKS = 1024
"""Rank counts that are looked at."""


def fitting_ranks(recipe: Recipe) -> str:
    """The rank counts that the batch divides by, the first of them and the largest."""
    numbers = valid_ranks(recipe.batch.prompts_per_step, recipe.batch.updates_per_step, MOST_RANKS)
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... {numbers[-1]}"
