"""Checkpoints: everything that remembers, through one registry, whole or not at all.

    step_000050/
        policy/          Hugging Face form: loads with from_pretrained
        trainer/         DeepSpeed's own: weights, master weights, optimizer moments, one part a rank
        progress.json    the registry: every small thing that remembers
        plan.json  recipe.yaml  reward_sources/
        COMMITTED        written last; without it the folder does not exist for anybody

It is written under another name and renamed when it is whole, so a checkpoint of the same step stays until then. Old checkpoints go only after
the new one is committed.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftcli.errors import ResumeError, RftError
from rftcli.plan.plan import Plan, plan_hash, plan_to_json
from rftcli.protocols import Learner, Stateful, World
from rftcli.runtime import disk
from rftcli.runtime.behind import Behind, Writing
from rftcli.runtime.reshape import UnreadableError, load_trainer
from rftcli.runtime.retention import prune
from rftcli.runtime.rundir import COMMITTED, RunDir, commit_text, json_text, step_name, step_number, write_text
from rftcli.runtime.writes import Later

UNFINISHED = ".writing_"
"""In front of the name of a checkpoint that is being written, or was when its run was killed."""
FRESH_OPTIMIZER = "go on from its weights with a fresh optimizer: `rft resume RUN_DIR --accept`"
BEFORE = "_before"
"""Behind the name of one that makes way for the same step of a later attempt."""


def save(
    run: RunDir,
    step: int,
    *,
    plan: Plan,
    learner: Learner,
    registry: Mapping[str, Stateful],
    export: Callable[..., None],
    reward_sources: tuple[Path, ...],
    world: World,
    behind: Behind | None = None,
) -> Path:
    """Write the checkpoint of `step`. Collective. Raises RftError on every rank when any rank could not write; older checkpoints are untouched.

    With `behind` everything is copied here, and written and committed by it; `export(folder, later)` then hands over what it would write.
    """
    began = behind.clock() if behind is not None else 0.0
    target = run.checkpoints / step_name(step)
    fresh = target.with_name(UNFINISHED + target.name)
    need = disk.next_checkpoint_bytes(plan, run.committed_checkpoints())
    failure = _on_rank_zero(world, lambda: _begin(fresh, need, with_trainer=plan.checkpoint.trainer_state))
    _agree(world, failure, fresh, target, need)
    later = None if behind is None else Later()
    handed = () if later is None else (later,)
    try:
        if plan.checkpoint.trainer_state:
            learner.save(fresh / "trainer", *handed)
        failure = None
    except (OSError, RuntimeError) as error:
        failure = _describe(error)
    _agree(world, failure, fresh, target, need)
    if plan.checkpoint.save_hf:
        try:
            export(fresh / "policy", *handed)  # collective: gathers sharded weights; rank 0 writes
        except RftError:  # raised on every rank alike
            _remove_half(world, fresh)
            raise
    progress = progress_text(step, plan, registry)

    def finish() -> None:
        _finish(fresh, target, step, plan, progress, run, reward_sources)

    if behind is not None and later is not None:
        behind.start(
            Writing(
                step=step,
                target=target,
                folder=fresh,
                actions=later.actions,
                commit=lambda: _then_prune(finish, run, plan),
                describe=_describe,
                refuse=lambda failures: refusal(failures, target, need),
                began=began,
            )
        )
        return target
    failure = _on_rank_zero(world, finish)
    _agree(world, failure, fresh, target, need)
    if world.rank == 0:
        prune(run, plan.checkpoint)
    return target


def _then_prune(finish: Callable[[], None], run: RunDir, plan: Plan) -> None:
    finish()
    prune(run, plan.checkpoint)


def progress_text(step: int, plan: Plan, registry: Mapping[str, Stateful]) -> str:
    """progress.json: what the registry remembers now."""
    progress = {"step": step, "plan": plan_hash(plan), "ranks": plan.world.ranks, "state": {k: dict(v.state_dict()) for k, v in registry.items()}}
    return json_text(progress)


def _begin(fresh: Path, need: int | None, *, with_trainer: bool) -> None:
    for left in sorted(fresh.parent.glob(f"{UNFINISHED}*")):
        named = left.with_name(left.name.removeprefix(UNFINISHED).removesuffix(BEFORE))
        if (left / COMMITTED).is_file() and not named.exists():
            left.rename(named)  # whole: the run was killed between two renames
        else:
            shutil.rmtree(left)  # a write that was cut short, of any step
    (fresh / "trainer" if with_trainer else fresh).mkdir(parents=True)
    free = disk.free_bytes(fresh)
    if need is not None and free is not None and free < need:
        raise OSError(errno.ENOSPC, "it would not fit", str(fresh))


def _finish(fresh: Path, target: Path, step: int, plan: Plan, progress: str, run: RunDir, reward_sources: tuple[Path, ...]) -> None:
    write_text(fresh / "progress.json", progress)
    write_text(fresh / "plan.json", plan_to_json(plan))
    if run.recipe.is_file():
        shutil.copyfile(run.recipe, fresh / "recipe.yaml")
    if reward_sources:
        root = Path(plan.rewards.search_path)
        for source in reward_sources:  # packages keep their folders, so that `pkg.mod` is found again
            copy = fresh / "reward_sources" / (source.relative_to(root) if source.is_relative_to(root) else source.name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
    _sync_tree(fresh)
    write_text(fresh / COMMITTED, commit_text(step, run.last_attempt()))
    _sync_directory(fresh)
    if target.exists():  # the same step of an earlier attempt
        before = target.with_name(UNFINISHED + target.name + BEFORE)
        target.rename(before)
        fresh.rename(target)
        shutil.rmtree(before, ignore_errors=True)
    else:
        fresh.rename(target)
    _sync_directory(target.parent)


def _on_rank_zero(world: World, action: Callable[[], None]) -> str | None:
    if world.rank != 0:
        return None
    try:
        action()
    except OSError as error:
        return _describe(error)
    return None


def _describe(error: Exception) -> str:
    if disk.is_full(error):
        return f"no space left on the disk ({getattr(error, 'filename', None) or 'while writing'})"
    if isinstance(error, RuntimeError):  # torch.save reports a full disk as RuntimeError
        first_line = str(error).partition("\n")[0]
        return f"a file could not be written whole (is the disk full?): {first_line}"
    return f"{type(error).__name__}: {error}"


def _remove_half(world: World, fresh: Path) -> None:
    if world.rank == 0:
        shutil.rmtree(fresh, ignore_errors=True)


def _agree(world: World, failure: str | None, fresh: Path, target: Path, need: int | None) -> None:
    """Raise on every rank alike when any of them failed. The half checkpoint is removed, so that the disk has room for a second try."""
    failures = world.gather(failure)
    if any(text is not None for text in failures):
        _remove_half(world, fresh)
        raise refusal(failures, target, need)


def refusal(failures: Sequence[str | None], target: Path, need: int | None) -> RftError:
    """What every rank raises, from what went wrong on each (None: nothing)."""
    rank, text = next((rank, text) for rank, text in enumerate(failures) if text is not None)
    folder, run = (shlex.quote(str(path)) for path in (target.parent, target.parent.parent))
    room = "" if need is None else f"; a checkpoint takes about {disk.size_text(need)}, {disk.free_text(target.parent)}"
    whole = any(target.parent.glob(f"*/{COMMITTED}"))
    way = f"`rft resume {run}`: earlier checkpoints are whole" if whole else "start it again: there is no whole checkpoint yet"
    told = f"the checkpoint {target.name} could not be written: rank {rank}: {text}{room}"
    return RftError(told, hint=f"free space (`df -h {folder}`), then {way}")


def _sync_tree(folder: Path) -> None:
    for item in sorted(folder.rglob("*")):
        if item.is_file():
            handle = os.open(item, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def restore(
    folder: Path,
    *,
    learner: Learner,
    registry: Mapping[str, Stateful],
    world: World,
    accept: bool = False,
    warn: Callable[[str, str], None] = lambda code, text: None,
) -> int:
    """Load everything that remembers; returns the step. Collective. Raises ResumeError when the folder is not a whole checkpoint of this plan.

    With `accept`, what a changed plan does not share with the checkpoint starts anew, each with a warning: data that changed, parts that are new.
    """
    progress = read_progress(folder)
    states: dict[str, Any] = progress["state"]
    if set(states) != set(registry) and not accept:
        raise ResumeError(
            f"{folder} remembers {sorted(states)}, this plan needs {sorted(registry)}",
            hint="resume with the version that wrote the checkpoint, or let the difference start anew: `rft resume RUN_DIR --accept`",
        )
    try:
        if (folder / "trainer").is_dir():
            load_trainer(folder / "trainer", learner, world, written_by=int(progress["ranks"]))
        elif not accept:
            raise ResumeError(f"{folder} holds no trainer state (checkpoint.trainer_state was false)", hint=FRESH_OPTIMIZER)
    except (OSError, RuntimeError, AssertionError, EOFError, UnreadableError) as error:  # what torch and DeepSpeed say of a damaged or missing file
        text = str(error).partition("\n")[0] or type(error).__name__
        raise ResumeError(f"{folder}/trainer cannot be read: {text}", hint=older(folder)) from error
    for name, item in registry.items():
        if name not in states:
            warn("starts_anew", f"the checkpoint does not remember `{name}`: it starts anew")
            continue
        try:
            item.load_state_dict(states[name])
        except ResumeError as error:
            if not accept:
                raise
            warn("starts_anew", f"`{name}` starts anew: {error.message}")
    for name in sorted(set(states) - set(registry)):
        warn("left_behind", f"the checkpoint remembers `{name}`, which this plan does not have")
    return int(progress["step"])


def read_progress(folder: Path) -> dict[str, Any]:
    if not (folder / COMMITTED).is_file():
        raise ResumeError(f"{folder} is not a whole checkpoint (no {COMMITTED})")
    try:
        progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResumeError(f"{folder}/progress.json cannot be read: {error}", hint=older(folder)) from error
    if not isinstance(progress, dict) or not {"step", "ranks", "state"} <= set(progress) or not isinstance(progress["state"], dict):
        raise ResumeError(f"{folder}/progress.json is damaged", hint=older(folder))
    return progress


def older(folder: Path) -> str | None:
    """The way out of a damaged checkpoint: the next older whole one."""
    run = RunDir(folder.parent.parent)
    older = [step_number(item) for item in run.committed_checkpoints() if item.name < folder.name]
    return f"`rft resume {run.quoted} --step {max(older)}` goes on from the checkpoint before" if older else None
