"""When checkpoints are written and what stays of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcli.plan.plan import CheckpointPlan
from rftcli.plan.plan_run import KeepBestPlan

if TYPE_CHECKING:
    from rftcli.recipe.sections import Recipe


def checkpoint_plan(recipe: Recipe, *, background: bool) -> CheckpointPlan:
    section = recipe.checkpoint
    best = None
    if section.keep_best is not None:
        name, _, metric = section.keep_best.metric.removeprefix("eval.").rpartition(".")
        best = KeepBestPlan(set=name, metric=metric, highest=section.keep_best.mode == "max", keep=section.keep_best.keep)
    return CheckpointPlan(
        every=section.every,
        every_minutes=section.every_minutes,
        before_deadline=section.before_deadline,
        deadline_margin_seconds=section.deadline_margin_seconds,
        keep=section.keep,
        keep_best=best,
        max_gib=section.max_gib,
        trainer_state=section.trainer_state,
        save_hf=section.save_hf,
        background=background,
    )
