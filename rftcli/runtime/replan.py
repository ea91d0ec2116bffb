"""The plan a run goes on with: the last attempt's, or one made anew where the recipe, `--set` or the rank count ask for something else.

Leaves out which differences are allowed (`changes`). No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rftcli.errors import RecipeError, ResumeError
from rftcli.events import StepDone, last_attempts, read_events
from rftcli.plan.plan import LearnerPlan, Plan
from rftcli.recipe.problems import Problem
from rftcli.recipe.schema import resolved_yaml
from rftcli.recipe.sections import Recipe
from rftcli.redact import BLANK
from rftcli.runtime import prepare
from rftcli.runtime.changes import FREE, IMPOSSIBLE, Change, changes
from rftcli.runtime.prepare import Prepared, Several
from rftcli.runtime.rundir import RunDir, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPlan:
    plan: Plan
    changes: tuple[Change, ...] = ()
    resolved: str | None = None
    """The recipe behind the plan, resolved; None: the plan was not made anew."""
    warnings: tuple[str, ...] = ()


def next_plan(
    run: RunDir, old: Plan, sets: Sequence[str], *, ranks: int | None, gpus: int | None, several: Several | None = None
) -> NextPlan:
    """The plan that `sets`, an edited recipe in the run directory and the rank count ask for. RecipeError or ResumeError where there is none."""
    recipe = _manifest(run).get("recipe") or {}
    edited = run.recipe.is_file() and recipe.get("sha256") not in (None, digest(run.recipe))
    count = None if several is None else several.ranks
    asked = (count or ranks or gpus or old.world.ranks, "cpu" if ranks else "cuda" if gpus else old.world.device)
    resolved = newest_resolved(run)
    if resolved == run.resolved and recipe.get("resolved_sha256") not in (None, digest(resolved)):
        edited_resolved = True
    else:
        edited_resolved = False
    if not (sets or edited or edited_resolved or asked != (old.world.ranks, old.world.device)):
        return NextPlan(plan=old)
    if resolved is None:
        raise ResumeError(f"{run.path} was started from a finished plan, which cannot be changed", hint="start from a recipe: `rft train RECIPE`")
    count, device = asked
    where = {"ranks": count if device == "cpu" else None, "gpus": count if device == "cuda" and several is None else None}
    if edited:
        blanked = [item for item in recipe["sets"] if BLANK in item]
        if blanked:
            raise ResumeError(
                f"{run.recipe} was edited, and what was laid on it held a secret, which is written nowhere: --set {blanked[0]}",
                hint="give the value as ${NAME} of the environment and start again, or put recipe.yaml back as it was",
            )
        text, path, sets = run.recipe.read_text(encoding="utf-8"), Path(recipe["path"]), [*recipe["sets"], *sets]
    else:
        text, path = None, resolved
    return compared(run, old, _prepared(run, old, path, sets, text=text, several=several, **where))


def _prepared(
    run: RunDir, old: Plan, path: Path, sets: Sequence[str], *, text: str | None, ranks: int | None, gpus: int | None, several: Several | None
) -> Prepared:
    try:
        loaded = prepare.load(path, sets, text=text)
    except RecipeError as error:
        problems = [problem for problem in error.problems if isinstance(problem, Problem)]
        if problems and all(problem.code == "label-without-reward" for problem in problems):
            raise ResumeError(f"a label that the data uses has no reward any more\n{error.message}") from error
        raise
    gone = sorted(used_labels(run) & (set(old.rewards.labels) - set(loaded.recipe.rewards)))
    if gone:
        was = "; ".join(f"rewards.labels.{label}: present -> absent" for label in gone)
        raise ResumeError(f"completions of this run were rewarded by labels that are gone: {was}", hint="put the entries back")
    if loaded.recipe.train.deepspeed.zero_stage == "auto":  # decided once; another machine is no reason to write the trainer's state anew
        sets = [*sets, f"train.deepspeed.zero_stage={old.learner.zero_stage}"]
    return prepare.prepare(path, sets, ranks=ranks, gpus=gpus, several=several, text=text)


def compared(run: RunDir, old: Plan, prepared: Prepared) -> NextPlan:
    """A fresh plan as a continuation of `old`: it keeps the name, the folder of user code, and the schedule's horizon where the recipe names none."""
    plan = prepared.plan
    rewards = replace(plan.rewards, search_path=old.rewards.search_path)
    plan = replace(plan, name=old.name, rewards=rewards)
    if prepared.loaded is not None:
        plan = _with_horizons(plan, old, prepared.loaded.recipe)
    return NextPlan(
        plan=plan,
        changes=changes(old, plan, used_labels(run)),
        resolved=None if prepared.loaded is None else resolved_yaml(prepared.loaded),
        warnings=prepared.warnings,
    )


def _with_horizons(plan: Plan, old: Plan, recipe: Recipe) -> Plan:
    """`plan` with the horizons of the old schedules, in steps, where the recipe names none."""

    def kept(learner: LearnerPlan, before: LearnerPlan) -> LearnerPlan:
        horizon = before.schedule_updates // old.batch.optimizer_updates_per_step
        return replace(learner, schedule_updates=horizon * plan.batch.optimizer_updates_per_step)

    if recipe.train.optimizer.schedule_steps is None:
        plan = replace(plan, learner=kept(plan.learner, old.learner))
    critic = recipe.models.critic
    if critic is not None and critic.optimizer.schedule_steps is None and plan.critic is not None and old.critic is not None:
        plan = replace(plan, critic=replace(plan.critic, learner=kept(plan.critic.learner, old.critic.learner)))
    return plan


def refuse(run: RunDir, found: Sequence[Change], *, accept: bool) -> None:
    """ResumeError (4) with the differences where one is impossible, or risky and not accepted."""
    impossible = [change for change in found if change.kind == IMPOSSIBLE]
    risky = [change for change in found if change.kind not in (IMPOSSIBLE, FREE)]
    shown = "\n".join(f"  {change}" for change in found)
    if impossible:
        raise ResumeError(
            f"{run.path} cannot go on with these changes:\n{shown}",
            hint="take back the impossible ones, or start anew from its weights: `rft train RECIPE --set models.policy.path=CHECKPOINT/policy`",
        )
    if risky and not accept:
        raise ResumeError(f"{run.path} would not be the same run with these changes:\n{shown}", hint="`--accept` goes on with them")


def used_labels(run: RunDir) -> set[str]:
    """Labels that completions of the run had, by its step lines."""
    events = last_attempts(read_events(run.events)) if run.events.exists() else []
    return {str(label) for event in events if isinstance(event, StepDone) for label in event.metrics.get("labels", {})}


def newest_resolved(run: RunDir) -> Path | None:
    """The resolved recipe that the newest plan was made from; None for a run that was started from a plan."""
    numbers = range(run.last_attempt(), 0, -1)
    candidates = [*(run.attempt(number).path / run.resolved.name for number in numbers), run.resolved]
    return next((path for path in candidates if path.is_file()), None)


def record(run: RunDir, attempt: int, step: int, found: Sequence[Change], *, accept: bool) -> None:
    """Into the manifest: what changed at which attempt; from here on the recipe in the run directory counts as seen."""
    manifest = _manifest(run)
    if not manifest:
        return
    if found:
        entry = {"attempt": attempt, "step": step, "accepted": accept, "changes": [str(change) for change in found]}
        manifest["resumed_with"] = [*manifest.get("resumed_with", []), entry]
    if manifest.get("recipe"):
        manifest["recipe"] = {**manifest["recipe"], **digests(run)}
    write_json(run.manifest, manifest)


def digests(run: RunDir) -> dict[str, str]:
    files = {"sha256": run.recipe, "resolved_sha256": run.resolved}
    return {name: digest(path) for name, path in files.items() if path.is_file()}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _manifest(run: RunDir) -> dict[str, Any]:
    try:
        found = json.loads(run.manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
