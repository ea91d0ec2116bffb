"""A new run that starts from another one's checkpoint; the old run is only read. No torch.

The checkpoint is linked into the new directory (its files never change once they are whole), so neither run depends on what the other removes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

from rftcli.errors import ResumeError
from rftcli.plan.plan import plan_to_json
from rftcli.runtime.replan import digests
from rftcli.runtime.rundir import COMMITTED, RunDir, State, commit_text, write_json, write_text
from rftcli.runtime.start import Resumption


def fork(run: RunDir, resumption: Resumption, name: str) -> tuple[RunDir, Resumption]:
    """The new run and where it goes on. `name`: a directory beside the run's, or a path. ResumeError where nothing is to start from or to do."""
    if resumption.checkpoint is None:
        raise ResumeError(f"{run.path} has no whole checkpoint to fork from", hint="`rft train RECIPE` starts anew")
    if resumption.step >= resumption.plan.steps:
        done = f"step {resumption.step} of {resumption.plan.steps} is done: nothing is left to train"
        raise ResumeError(done, hint="`--set train.steps=N`, or `--step`")
    new = RunDir(Path(name) if os.sep in name else run.path.parent / name)
    new.create()
    for file in (run.recipe, run.resolved):
        if file.is_file():
            shutil.copyfile(file, new.path / file.name)
    if resumption.resolved is not None:
        write_text(new.resolved, resumption.resolved)
    write_text(new.plan, plan_to_json(resumption.plan))
    folder = new.checkpoints / resumption.checkpoint.name
    shutil.copytree(resumption.checkpoint, folder, copy_function=_link, ignore=shutil.ignore_patterns(COMMITTED))
    held_out = run.evals / f"{folder.name}.json"
    if held_out.is_file():
        shutil.copyfile(held_out, new.evals / held_out.name)
    origin = {"run": str(run.path), "step": resumption.step, "changes": [str(change) for change in resumption.changes]}
    manifest = json.loads(run.manifest.read_text(encoding="utf-8")) if run.manifest.is_file() else {}
    manifest.pop("resumed_with", None)
    recipe = {**manifest["recipe"], **digests(new)} if manifest.get("recipe") else None
    write_json(new.manifest, {**manifest, "recipe": recipe, "forked_from": origin})
    write_text(folder / COMMITTED, commit_text(resumption.step, 0))
    cause = f"forked from {run.path} after step {resumption.step}"
    new.write_state(State(status="stopped", step=resumption.step, attempt=0, cause=cause, heartbeat=time.time()))
    text = f"{new.path}: {cause} of {resumption.plan.steps}; {run.path} stays as it is"
    return new, replace(resumption, checkpoint=folder, last_attempt=0, nothing_to_do=False, text=text, resolved=None)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
