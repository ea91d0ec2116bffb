"""Which checkpoints stay: the newest, the best, and no more than a size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rftcli.plan.plan import CheckpointPlan
from rftcli.plan.plan_run import KeepBestPlan
from rftcli.runtime.retention import prune, superfluous
from rftcli.runtime.rundir import COMMITTED, RunDir, commit_text, step_name, step_number

BEST = KeepBestPlan(set="test", metric="mean@1", highest=True, keep=1)
PLAN = CheckpointPlan(
    every=1, every_minutes=None, before_deadline=False, deadline_margin_seconds=0, keep=2, keep_best=BEST, max_gib=None,
    trainer_state=True, save_hf=True,
)  # fmt: skip
KIB = 1 / 1024**2
"""GiB of a KiB."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def checkpoint(run: RunDir, step: int, value: float | None = None, *, kib: int = 1, whole: bool = True) -> None:
    folder = run.checkpoints / step_name(step)
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1024 * kib))
    if whole:
        (folder / COMMITTED).write_text(commit_text(step, 1))
    if value is not None:
        found = {"step": step, "sets": {"test": {"mean@1": {"value": value}, "prompts": 4}}}
        (run.evals / f"{step_name(step)}.json").write_text(json.dumps(found))


def staying(run: RunDir, plan: CheckpointPlan) -> list[int]:
    gone = superfluous(run, plan)
    return [step_number(folder) for folder in run.committed_checkpoints() if folder not in gone]


def test_the_best_stays_beside_the_newest(run: RunDir) -> None:
    for step, value in enumerate([0.1, 0.9, 0.3, 0.9, 0.2, 0.4], start=1):
        checkpoint(run, step, value)
    assert staying(run, PLAN) == [4, 5, 6]  # of equals the newer
    assert staying(run, replace(PLAN, keep_best=replace(BEST, keep=2))) == [2, 4, 5, 6]
    assert staying(run, replace(PLAN, keep_best=replace(BEST, highest=False))) == [1, 5, 6]
    assert staying(run, replace(PLAN, keep_best=None)) == [5, 6]
    prune(run, PLAN)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000004", "step_000005", "step_000006"]


def test_without_an_evaluation_there_is_no_best(run: RunDir) -> None:
    for step in range(1, 5):
        checkpoint(run, step)
    (run.evals / "step_000001.json").write_text("{")
    (run.evals / "step_000002.json").write_text(json.dumps({"sets": {"other": {}}}))
    assert staying(run, PLAN) == [3, 4]


def test_sizes_are_kept_without_the_newest_and_the_best(run: RunDir) -> None:
    for step, value in enumerate([0.9, 0.1, 0.2, 0.3], start=1):
        checkpoint(run, step, value, kib=100)
    plan = replace(PLAN, keep=4)
    assert staying(run, replace(plan, max_gib=1000 * KIB)) == [1, 2, 3, 4]
    assert staying(run, replace(plan, max_gib=350 * KIB)) == [1, 3, 4]
    assert staying(run, replace(plan, max_gib=250 * KIB)) == [1, 4]
    assert staying(run, replace(plan, max_gib=KIB)) == [1, 4]  # never the newest, never the best
    assert staying(run, replace(plan, max_gib=KIB, keep_best=None)) == [4]


def test_what_is_not_whole_is_not_counted(run: RunDir) -> None:
    for step in range(1, 4):
        checkpoint(run, step, 0.1 * step, whole=step != 3)
    assert staying(run, replace(PLAN, keep=1, keep_best=None)) == [2]
    prune(run, replace(PLAN, keep=1, keep_best=None))
    assert (run.checkpoints / "step_000003").is_dir()  # somebody may be writing it
