"""Create a run and start its ranks; start them again; evaluate. Called by the commands, uses `prepare` and `launch`; no torch."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from rftcli import __version__
from rftcli.errors import ResumeError, UsageError
from rftcli.plan.plan import Plan, plan_from_json, plan_hash, plan_to_json
from rftcli.probe.data import DataFacts
from rftcli.protocols import Observer
from rftcli.recipe.schema import resolved_yaml
from rftcli.redact import known_values, redacted_arguments
from rftcli.runtime import prepare
from rftcli.runtime.checkpoint import read_progress
from rftcli.runtime.launch import Outcome, launch
from rftcli.runtime.prepare import Prepared, Several
from rftcli.runtime.rundir import COMMITTED, AttemptDir, RunDir, step_name, step_number, write_json, write_text
from rftcli.runtime.verdict import process_start
from rftcli.runtime.ways import Way

PACKAGES = ("torch", "transformers", "deepspeed", "pydantic", "safetensors", "tokenizers", "numpy")


def create(prepared: Prepared, run_dir: Path | None) -> RunDir:
    """A fresh run directory with everything that says what will run. UsageError when it is in use."""
    plan = prepared.plan
    run = RunDir(run_dir or Path("runs") / f"{plan.name}-{_utc_now()}")
    run.create()
    write_text(run.plan, plan_to_json(plan))
    if prepared.loaded is not None:
        shutil.copyfile(prepared.loaded.path, run.recipe)
        write_text(run.resolved, resolved_yaml(prepared.loaded))
    write_json(run.manifest, manifest(prepared))
    return run


def train(run: RunDir, plan: Plan, observers: Sequence[Observer], way: Way | None = None) -> Outcome:
    with run.locked():
        return launch(run, _attempt(run, plan), plan, job={"mode": "train", "step": 0, "checkpoint": None}, observers=observers, way=way)


def _attempt(run: RunDir, plan: Plan) -> AttemptDir:
    attempt = run.attempt(run.last_attempt() + 1)
    attempt.create()
    write_text(attempt.plan, plan_to_json(plan))
    return attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    plan: Plan
    step: int
    checkpoint: Path | None
    """None: nothing was saved yet; the run starts over."""
    text: str
    last_attempt: int
    """The newest attempt when this was decided."""
    nothing_to_do: bool = False


def resumption(run: RunDir, *, step: int | None) -> Resumption:
    """Where a run goes on. ResumeError (4) when it cannot, with what stands in the way."""
    state = run.read_state()
    if state is None:
        raise ResumeError(f"{run.path} is not a run directory (no state.json)", hint="`rft train RECIPE --run-dir ...` starts a run")
    last = run.last_attempt()
    if _alive(run.attempt(last)):  # whatever state.json says: two attempts at once would write over each other
        raise ResumeError(f"{run.path} is running (attempt {last}, step {state.step})", hint=f"`rft status {run.path}`; stop it first")
    if last and _mode(run.attempt(last)) == "eval":
        raise ResumeError(f"{run.path} holds an evaluation, which leaves nothing to go on with", hint="`rft eval` makes another one")
    plan = _saved_plan(run.attempt(last).plan if last else run.plan)
    folder = _checkpoint(run, step)
    if folder is None:
        return Resumption(
            last_attempt=last, plan=plan, step=0, checkpoint=None, text=f"{run.path}: no checkpoint was committed yet, starting over at step 1"
        )
    progress = read_progress(folder)
    if progress["ranks"] != plan.world.ranks:
        raise ResumeError(f"{folder.name} was written by {progress['ranks']} ranks, the plan has {plan.world.ranks}")
    at = int(progress["step"])
    if at >= plan.steps:
        done = state.status == "done"  # else the run ended between its last checkpoint and the export to final/
        text = f"{run.path}: step {at} of {plan.steps} is done, nothing is left {'to train' if done else 'but to write final/'}"
        return Resumption(last_attempt=last, plan=plan, step=at, checkpoint=folder, text=text, nothing_to_do=done)
    return Resumption(
        last_attempt=last, plan=plan, step=at, checkpoint=folder, text=f"{run.path}: going on after step {at} of {plan.steps} (attempt {last + 1})"
    )


def _mode(attempt: AttemptDir) -> str:
    """train or eval; train where it is not written down."""
    try:
        return str(json.loads(attempt.launch.read_text(encoding="utf-8"))["job"]["mode"])
    except (OSError, ValueError, KeyError):
        return "train"


def _saved_plan(path: Path) -> Plan:
    try:
        return plan_from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResumeError(f"{path} cannot be read as a plan: {error}", hint="it was written by another version, or is damaged") from error


def _checkpoint(run: RunDir, step: int | None) -> Path | None:
    whole = run.committed_checkpoints()
    if step is None:
        return whole[-1] if whole else None
    folder = run.checkpoints / step_name(step)
    if folder not in whole:
        there = ", ".join(str(step) for step in sorted(map(step_number, whole))) or "none"
        raise ResumeError(f"there is no whole checkpoint of step {step}", hint=f"whole checkpoints: {there}")
    return folder


def _alive(attempt: AttemptDir) -> bool:
    """Is any rank of the attempt still a process on this machine, or one on another that has said something lately?"""
    state = attempt.run.read_state()
    for path in attempt.ranks.glob("rank_*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("host", platform.node()) != platform.node():
            if state is not None and state.status == "running" and state.attempt == attempt.number and not state.looks_dead:
                return True
        elif process_start(int(record["pid"])) == record["started"]:
            return True
    return False


def resume(run: RunDir, resumption: Resumption, observers: Sequence[Observer], way: Way | None = None, several: Several | None = None) -> Outcome:
    """`several` where the ranks are not on this machine alone: as many as before, on any number of nodes."""
    plan = resumption.plan
    nodes = 1 if several is None else several.nodes
    if several is not None and several.ranks != plan.world.ranks:
        raise ResumeError(f"the run has {plan.world.ranks} ranks, {several.ranks} were asked for", hint=f"start {plan.world.ranks} of them")
    plan = replace(plan, world=replace(plan.world, nodes=nodes))
    checkpoint = None if resumption.checkpoint is None else str(resumption.checkpoint)
    job = {"mode": "train", "step": resumption.step, "checkpoint": checkpoint}
    with run.locked():
        if run.last_attempt() != resumption.last_attempt:
            raise ResumeError(f"{run.path} was gone on with by another command just now", hint=f"`rft status {run.path}`")
        return launch(run, _attempt(run, plan), plan, job=job, observers=observers, way=way)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob:
    run: RunDir
    plan: Plan
    checkpoint: Path | None
    step: int
    what: str


def evaluation(
    target: Path, sets: Sequence[str], run_dir: Path | None, *, ranks: int | None, gpus: int | None, several: Several | None = None
) -> EvalJob:
    """What to evaluate and where its results go: always a directory of its own."""
    if target.is_dir():
        folder = _checkpoint_of(target)
        if sets:
            raise UsageError(
                "--set changes a recipe; a checkpoint is evaluated by its own plan",
                hint=f"other data or settings: `rft eval RECIPE --set models.policy.path={folder / 'policy'} --set ...`",
            )
        plan = _saved_plan(folder / "plan.json")
        machine = prepare.machine_at_hand(ranks, gpus, several)
        plan = replace(plan, world=_world_here(plan, machine, ranks, gpus, several))
        step, what, prepared = int(read_progress(folder)["step"]), str(folder), None
    else:
        prepared = prepare.prepare(target, sets, ranks=ranks, gpus=gpus, several=several)
        plan, folder, step, what = prepared.plan, None, 0, f"the untrained model of {target}"
    if not plan.data.eval:
        raise UsageError(f"{target} has no evaluation sets", hint="name one under data.eval of the recipe")
    if folder is not None and not (folder / "policy").is_dir():
        raise UsageError(f"{folder} holds no policy/ (checkpoint.save_hf was false)")
    run = RunDir(run_dir or Path("runs") / f"eval-{plan.name}-{step_name(step)}-{_utc_now()}")
    run.create()
    write_text(run.plan, plan_to_json(plan))
    return EvalJob(run=run, plan=plan, checkpoint=folder, step=step, what=what)


def _world_here(plan: Plan, machine: Any, ranks: int | None, gpus: int | None, several: Several | None) -> Any:
    """The checkpoint's plan on the machine at hand: as many ranks as asked for, else as it was trained with."""
    device = "cuda" if machine.gpus else "cpu"
    count = ranks or gpus or (min(machine.gpus, plan.world.ranks) if machine.gpus else plan.world.ranks)
    count, nodes = (count, 1) if several is None else (several.ranks, several.nodes)
    threads = max(1, machine.cores // max(1, count // nodes))
    backend = "nccl" if device == "cuda" else "gloo"
    return replace(plan.world, ranks=count, nodes=nodes, device=device, backend=backend, threads_per_rank=threads)


def _checkpoint_of(target: Path) -> Path:
    """The checkpoint folder meant by a checkpoint, its policy/ folder, or a run directory."""
    if (target / COMMITTED).is_file():
        return target.absolute()
    if target.name == "policy" and (target.parent / COMMITTED).is_file():
        return target.parent.absolute()
    whole = RunDir(target).committed_checkpoints()
    if whole:
        return whole[-1]
    raise UsageError(
        f"{target} is neither a whole checkpoint nor a run directory with one",
        hint="give runs/<name>/checkpoints/step_NNNNNN, runs/<name>, or a recipe (which scores the untrained model)",
    )


def evaluate(job: EvalJob, observers: Sequence[Observer], way: Way | None = None) -> Outcome:
    checkpoint = None if job.checkpoint is None else str(job.checkpoint)
    return launch(
        job.run, _attempt(job.run, job.plan), job.plan, job={"mode": "eval", "step": job.step, "checkpoint": checkpoint}, observers=observers, way=way
    )


def manifest(prepared: Prepared) -> dict[str, Any]:
    """What a person needs to say what ran: command, versions, machine, data fingerprints, seed. No environment values: they may hold secrets."""
    from rftcli.codec import to_data

    plan = prepared.plan
    return {
        "argv": redacted_arguments(sys.argv, known_values(os.environ)),
        "version": __version__,
        "git": _git_sha(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": {"host": platform.node(), "platform": platform.platform(), **to_data(prepared.machine)},
        "seed": plan.seed,
        "plan": plan_hash(plan),
        "data": {} if prepared.data is None else {"train": _fingerprints(prepared.data.train), "eval": _fingerprints(prepared.data.eval)},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "user_rewards": sorted({part.target for parts in plan.rewards.labels.values() for part in parts if part.kind == "python"}),
    }


def _fingerprints(facts: DataFacts) -> dict[str, Any]:
    return {one.name: {"rows": one.rows, "fingerprint": one.fingerprint} for one in facts.sets}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_sha() -> str | None:
    """Commit of the working directory, with `-dirty` when it has changes; None outside git."""
    git = shutil.which("git")
    if git is None:
        return None
    run = subprocess.run(
        [git, "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    return run.stdout.strip() or None


def _utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
