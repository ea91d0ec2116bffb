"""Which checkpoints stay: the newest, the best by an evaluation, and no more than a size. Only whole ones are counted; the newest never goes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rftcli.plan.memory import GIB
from rftcli.plan.plan import CheckpointPlan
from rftcli.plan.plan_run import KeepBestPlan
from rftcli.runtime.disk import size_of
from rftcli.runtime.rundir import COMMITTED, RunDir, step_number


def prune(run: RunDir, plan: CheckpointPlan) -> None:
    """Remove what need not stay. COMMITTED goes first, so a removal cut short leaves nothing half."""
    for old in superfluous(run, plan):
        (old / COMMITTED).unlink()
        shutil.rmtree(old, ignore_errors=True)  # what cannot be deleted is no reason to end a run


def superfluous(run: RunDir, plan: CheckpointPlan) -> list[Path]:
    """Checkpoints that go, the oldest first."""
    whole = run.committed_checkpoints()
    best = set() if plan.keep_best is None else set(best_of(run, whole, plan.keep_best))
    newest = set(whole[-plan.keep :]) if plan.keep > 0 else set(whole)
    going = [folder for folder in whole if folder not in newest | best]
    if plan.max_gib is not None:
        staying = [folder for folder in whole if folder not in going]
        sizes = {folder: size_of(folder) for folder in staying}
        for folder in staying[:-1]:
            if sum(sizes.values()) <= plan.max_gib * GIB:
                break
            if folder not in best:
                going.append(folder)
                del sizes[folder]
    return going


def best_of(run: RunDir, whole: list[Path], plan: KeepBestPlan) -> list[Path]:
    """The best of these checkpoints by their evaluations, the best first; of equals the newer. One without an evaluation is not among them."""
    values = [(value, index) for index, folder in enumerate(whole) if (value := metric_at(run, step_number(folder), plan)) is not None]
    ranked = sorted(values if plan.highest else [(-value, index) for value, index in values], reverse=True)
    return [whole[index] for _, index in ranked[: plan.keep]]


def metric_at(run: RunDir, step: int, plan: KeepBestPlan) -> float | None:
    """The metric of the evaluation after `step`; None where there was none."""
    try:
        found = json.loads((run.evals / f"step_{step:06d}.json").read_text(encoding="utf-8"))["sets"][plan.set][plan.metric]
    except (OSError, ValueError, KeyError):
        return None
    return float(found["value"] if isinstance(found, dict) else found)
