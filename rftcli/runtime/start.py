"""Create a run and start its ranks; start them again; evaluate. Called by the commands, uses `prepare` and `launch`; no torch."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
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
from rftcli.redact import known_values, redacted, redacted_arguments
from rftcli.rewards.scorers.spec import ScorerSpec
from rftcli.runtime import prepare
from rftcli.runtime.changes import Change
from rftcli.runtime.checkpoint import FRESH_OPTIMIZER, older, read_progress
from rftcli.runtime.deadline import DEADLINES, announced
from rftcli.runtime.launch import Outcome, launch
from rftcli.runtime.prepare import Prepared, Several
from rftcli.runtime.replan import compared, digests, next_plan, record, refuse
from rftcli.runtime.rundir import COMMITTED, AttemptDir, RunDir, State, step_name, step_number, write_json, write_text
from rftcli.runtime.verdict import attempt_lives
from rftcli.runtime.ways import Way

PACKAGES = ("torch", "transformers", "deepspeed", "pydantic", "safetensors", "tokenizers", "numpy")


def run_path(plan: Plan, run_dir: Path | None) -> Path:
    """Where a run of the plan goes."""
    return run_dir or Path("runs") / f"{plan.name}-{_utc_now()}"


def holds_run(run_dir: Path) -> bool:
    """Is there a run to go on with? One that was killed before it started is none."""
    run = RunDir(run_dir)
    return run.state_file.is_file() or lost_state(run) is not None


def create(prepared: Prepared, run_dir: Path | None, *, again: bool = False) -> RunDir:
    """A fresh run directory with everything that says what will run. UsageError when it is in use; `again`: not by one killed while it was made."""
    plan = prepared.plan
    run = RunDir(run_path(plan, run_dir))
    run.create(again=again)
    write_text(run.plan, plan_to_json(plan))
    if prepared.loaded is not None:
        shutil.copyfile(prepared.loaded.path, run.recipe)
        write_text(run.resolved, resolved_yaml(prepared.loaded))
    record = manifest(prepared)
    if record["recipe"] is not None:
        record["recipe"].update(digests(run))
    write_json(run.manifest, record)
    return run


def train(run: RunDir, plan: Plan, observers: Sequence[Observer], way: Way | None = None) -> Outcome:
    with run.locked():
        return launch(run, _attempt(run, plan), plan, job=_job(plan, step=0, checkpoint=None), observers=observers, way=way)


MORE_STEPS = "to train (`--set train.steps=N` for more)"


def _job(plan: Plan, *, step: int, checkpoint: Path | None, accept: bool = False, warnings: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """What the ranks of a training attempt are told beside the plan."""
    deadline = announced(os.environ) if plan.checkpoint.before_deadline else None
    if plan.checkpoint.before_deadline and deadline is None:
        text = f"checkpoint.before_deadline is on, but neither {' nor '.join(DEADLINES)} is set: the run does not know when it has to stop"
        warnings = [*warnings, ("no_deadline", text)]
    return {
        "mode": "train",
        "step": step,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "accept": accept,
        "started": time.time(),
        "deadline": deadline,
        "warnings": list(warnings),
    }


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
    changes: tuple[Change, ...] = ()
    resolved: str | None = None
    """The recipe of a plan that was made anew."""
    accept: bool = False


def resumption(
    run: RunDir,
    *,
    step: int | None,
    sets: Sequence[str] = (),
    ranks: int | None = None,
    gpus: int | None = None,
    accept: bool = False,
    prepared: Prepared | None = None,
    several: Several | None = None,
    to_fork: bool = False,
) -> Resumption:
    """Where a run goes on, and with which plan: that of the last attempt, or of `prepared`, or of the recipe in it with `sets` on top.

    ResumeError (4) when it cannot, with what stands in the way. `to_fork`: the run itself is only read.
    """
    state = run.read_state() or lost_state(run)
    if state is None:
        raise ResumeError(f"{run.path} is not a run directory (no state.json)", hint="`rft train RECIPE --run-dir ...` starts a run")
    last = run.last_attempt()
    if not to_fork and attempt_lives(run.attempt(last)):  # whatever state.json says: two attempts at once would write over each other
        raise ResumeError(f"{run.path} is running (attempt {last}, step {state.step})", hint=f"`rft status {run.quoted}`; stop it first")
    if last and _mode(run.attempt(last)) == "eval":
        raise ResumeError(f"{run.path} holds an evaluation, which leaves nothing to go on with", hint="`rft eval` makes another one")
    old = _saved_plan(run.attempt(last).plan if last else run.plan)
    asked = compared(run, old, prepared) if prepared is not None else next_plan(
        run, old, sets, ranks=ranks, gpus=gpus, several=several
    )
    refuse(run, asked.changes, accept=accept)
    plan, folder = asked.plan, _checkpoint(run, step)
    common = {"last_attempt": last, "plan": plan, "changes": asked.changes, "resolved": asked.resolved}
    if folder is None:
        text = f"{run.path}: no checkpoint was committed yet, starting over at step 1"
        return Resumption(step=0, checkpoint=None, text=text, accept=accept, **common)
    accept = accept or _accepted(run.attempt(last), folder)
    at = _fits(folder, plan, accept=accept)
    if state.status == "done" and state.cause is not None and step is None and not asked.changes:
        text = f"{run.path}: ended after step {at} of {plan.steps} ({state.cause}), nothing is left to train"
        return Resumption(step=at, checkpoint=folder, text=text, nothing_to_do=True, accept=accept, **common)
    if at >= plan.steps:
        done = state.status == "done"  # else the run ended between its last checkpoint and the export to final/
        text = f"{run.path}: step {at} of {plan.steps} is done, nothing is left {MORE_STEPS if done else 'but to write final/'}"
        return Resumption(step=at, checkpoint=folder, text=text, nothing_to_do=done, accept=accept, **common)
    text = f"{run.path}: going on after step {at} of {plan.steps} (attempt {last + 1})"
    return Resumption(step=at, checkpoint=folder, text=text, accept=accept, **common)


def lost_state(run: RunDir) -> State | None:
    """What a run without a state file can go on from: its newest whole checkpoint. None where there is none, or no attempt that wrote it."""
    whole = run.committed_checkpoints()
    if not whole or not run.last_attempt():
        return None
    cause = "its state.json was gone"
    return State(status="failed", step=step_number(whole[-1]), attempt=run.last_attempt(), cause=cause, heartbeat=time.time())


def _fits(folder: Path, plan: Plan, *, accept: bool) -> int:
    """The step of a checkpoint that the plan can go on from."""
    progress = read_progress(folder)
    if progress["ranks"] != plan.world.ranks and not accept:
        raise ResumeError(
            f"{folder.name} was written by {progress['ranks']} ranks, the plan has {plan.world.ranks}",
            hint=f"`--accept` cuts the trainer's state anew for {plan.world.ranks}; `--ranks` or `--gpus {progress['ranks']}` goes on as it was",
        )
    if not (folder / "trainer").is_dir():
        if not (folder / "policy").is_dir():
            raise ResumeError(f"{folder} holds neither trainer/ nor policy/", hint=older(folder))
        if not accept:
            raise ResumeError(f"{folder} holds no trainer state (checkpoint.trainer_state was false)", hint=FRESH_OPTIMIZER)
    return int(progress["step"])


def _accepted(attempt: AttemptDir, folder: Path) -> bool:
    """Did the last attempt start from this very checkpoint with `--accept`, and write none of its own? Then so may the next one."""
    try:
        job = json.loads(attempt.launch.read_text(encoding="utf-8"))["job"]
        return bool(job["accept"]) and job["checkpoint"] == str(folder)
    except (OSError, ValueError, KeyError):
        return False


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


def resume(run: RunDir, resumption: Resumption, observers: Sequence[Observer], way: Way | None = None, several: Several | None = None) -> Outcome:
    """`several` where the ranks are not on this machine alone: on any number of nodes."""
    plan = resumption.plan
    if several is not None and several.ranks != plan.world.ranks:
        raise ResumeError(f"the run has {plan.world.ranks} ranks, {several.ranks} were asked for", hint=f"start {plan.world.ranks} of them")
    plan = replace(plan, world=replace(plan.world, nodes=1 if several is None else several.nodes))
    told = [("changed_on_resume", str(change)) for change in resumption.changes]
    job = _job(plan, step=resumption.step, checkpoint=resumption.checkpoint, accept=resumption.accept, warnings=told)
    with run.locked():
        if run.last_attempt() != resumption.last_attempt:
            raise ResumeError(f"{run.path} was gone on with by another command just now", hint=f"`rft status {run.quoted}`")
        attempt = _attempt(run, plan)
        if resumption.resolved is not None:
            write_text(attempt.path / run.resolved.name, resumption.resolved)
            record(run, attempt.number, resumption.step, resumption.changes, accept=resumption.accept)
        return launch(run, attempt, plan, job=job, observers=observers, way=way)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob:
    run: RunDir
    plan: Plan
    checkpoint: Path | None
    step: int
    what: str


def evaluation(
    target: Path, sets: Sequence[str], run_dir: Path | None, *, ranks: int | None, gpus: int | None, step: int | None = None,
    several: Several | None = None,
) -> EvalJob:  # fmt: skip
    """What to evaluate and where its results go: always a directory of its own. `step`: which checkpoint of a run."""
    if step is not None and (not target.is_dir() or (target / COMMITTED).is_file()):
        raise UsageError(f"--step chooses a checkpoint of a run directory, which {target} is not")
    if target.is_dir():
        folder = checkpoint_of(target, step)
        if sets:
            raise UsageError(
                "--set changes a recipe; a checkpoint is evaluated by its own plan",
                hint=f"other data or settings: `rft eval RECIPE --set models.policy.path={folder / 'policy'} --set ...`",
            )
        plan = _saved_plan(folder / "plan.json")
        machine = prepare.machine_at_hand(ranks, gpus, several)
        plan = replace(plan, world=_world_here(plan, machine, ranks, gpus, several))
        at, what = int(read_progress(folder)["step"]), str(folder)
    else:
        plan = prepare.prepare(target, sets, ranks=ranks, gpus=gpus, several=several).plan
        folder, at, what = None, 0, f"the untrained model of {target}"
    if not plan.data.eval:
        raise UsageError(f"{target} has no evaluation sets", hint="name one under data.eval of the recipe")
    if folder is not None and not (folder / "policy").is_dir():
        raise UsageError(f"{folder} holds no policy/ (checkpoint.save_hf was false)")
    run = RunDir(run_dir or Path("runs") / f"eval-{plan.name}-{step_name(at)}-{_utc_now()}")
    run.create()
    write_text(run.plan, plan_to_json(plan))
    return EvalJob(run=run, plan=plan, checkpoint=folder, step=at, what=what)


def _world_here(plan: Plan, machine: Any, ranks: int | None, gpus: int | None, several: Several | None) -> Any:
    """The checkpoint's plan on the machine at hand: as many ranks as asked for, else as it was trained with."""
    device = "cuda" if machine.gpus else "cpu"
    count = ranks or gpus or (min(machine.gpus, plan.world.ranks) if machine.gpus else plan.world.ranks)
    count, nodes = (count, 1) if several is None else (several.ranks, several.nodes)
    threads = machine.threads_of_a_rank(count // nodes)
    backend = "nccl" if device == "cuda" else "gloo"
    return replace(plan.world, ranks=count, nodes=nodes, device=device, backend=backend, threads_per_rank=threads)


def checkpoint_of(target: Path, step: int | None = None) -> Path:
    """The checkpoint folder meant by a checkpoint, its policy/ folder, or a run directory."""
    if (target / COMMITTED).is_file():
        return target.absolute()
    if target.name == "policy" and (target.parent / COMMITTED).is_file():
        return target.parent.absolute()
    whole = RunDir(target).committed_checkpoints()
    if whole and step is not None:
        try:
            return _checkpoint(RunDir(target), step) or whole[-1]
        except ResumeError as error:
            raise UsageError(error.message, hint=error.hint) from error
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
        "models": {
            "policy": {"path": plan.policy.given, "revision": plan.policy.revision},
            "reference": None if plan.reference is None else {"path": plan.reference.given, "revision": plan.reference.revision},
            "scorers": {spec.name: _scorer_record(spec) for spec in plan.scorers},
        },
        "data": {} if prepared.data is None else {"train": _fingerprints(prepared.data.train), "eval": _fingerprints(prepared.data.eval)},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "user_rewards": sorted(
            {part.target for table in (plan.rewards, plan.eval_rewards) for parts in table.labels.values() for part in parts if part.kind == "python"}
            | {spec.target for spec in plan.scorers if spec.target is not None}
        ),
        "recipe": _recipe_record(prepared),
    }


def _scorer_record(spec: ScorerSpec) -> dict[str, Any]:
    """Which model or service scored."""
    if spec.weights is not None:
        return {"kind": spec.kind, "path": spec.weights.given, "revision": spec.weights.revision}
    if spec.start is not None:
        return {"kind": spec.kind, "path": spec.start.given, "revision": spec.start.revision}
    if spec.service is not None:
        return {"kind": spec.kind, "urls": redacted(spec.service.urls, known_values(os.environ)), "model": spec.model}
    return {"kind": spec.kind, "python": spec.target}


def _recipe_record(prepared: Prepared) -> dict[str, Any] | None:
    """Where the recipe was read and what was laid on it, so that an edited copy can be read as if it stood there."""
    if prepared.loaded is None:
        return None
    return {"path": str(prepared.loaded.path), "sets": redacted_arguments(prepared.sets, known_values(os.environ))}


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
