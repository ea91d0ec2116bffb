"""What of a run directory can go: what a killed run left half written, and old checkpoints if asked. Finds and removes; no torch.

Never touched: whole checkpoints that are kept, `final/`, samples, evaluations, events, logs.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rftcli.errors import ResumeError, UsageError
from rftcli.plan.plan import Plan, plan_from_json
from rftcli.runtime.checkpoint import BEFORE, UNFINISHED
from rftcli.runtime.disk import size_of
from rftcli.runtime.retention import superfluous
from rftcli.runtime.rundir import COMMITTED, RunDir
from rftcli.runtime.verdict import attempt_lives, why_dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    path: Path
    bytes: int
    why: str


def removals(run: RunDir, *, keep: int | None) -> list[Removal]:
    """What would go. `keep`: so many of the newest whole checkpoints stay, and the best where the run keeps those; None keeps all."""
    found = [*_unfinished(run), *_parts(run)]
    if keep is not None:
        asked = replace(_plan(run).checkpoint, keep=keep, max_gib=None)
        found += [Removal(path=path, bytes=size_of(path), why="an older checkpoint") for path in superfluous(run, asked)]
    return found


def _plan(run: RunDir) -> Plan:
    last = run.last_attempt()
    path = run.attempt(last).plan if last else run.plan
    try:
        return plan_from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read, and it says which checkpoints are kept: {error}", hint="leave out --keep") from error


def _unfinished(run: RunDir) -> Iterator[Removal]:
    for path in sorted(run.checkpoints.iterdir()) if run.checkpoints.is_dir() else []:
        if not path.is_dir():
            continue
        if path.name.startswith(UNFINISHED):
            named = path.with_name(path.name.removeprefix(UNFINISHED).removesuffix(BEFORE))
            if (path / COMMITTED).is_file() and not named.exists():
                continue  # whole: the run was killed between two renames, and the next attempt puts it back
            yield Removal(path=path, bytes=size_of(path), why="a checkpoint that was not finished")
        elif path.name.startswith("step_") and not (path / COMMITTED).is_file():
            yield Removal(path=path, bytes=size_of(path), why="a checkpoint without COMMITTED")


def _parts(run: RunDir) -> Iterator[Removal]:
    for folder in (run.samples, run.evals):
        for path in sorted(folder.glob(".step_*")) if folder.is_dir() else []:
            yield Removal(path=path, bytes=size_of(path), why="one rank's part of a file that was not finished")


@contextlib.contextmanager
def at_rest(run: RunDir) -> Iterator[None]:
    """The run's lock, held. UsageError when the directory is none of a run, or the run goes on anywhere that shows (this machine's processes, or a
    heartbeat of another one's)."""
    state = run.read_state()
    if state is None:
        raise UsageError(f"{run.path} is not a run directory (no state.json)")
    running = UsageError(f"{run.path} is running (step {state.step})", hint=f"`rft status {run.quoted}`; stop it first")
    if (state.status == "running" and why_dead(run, state) is None) or attempt_lives(run.attempt(run.last_attempt())):
        raise running
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(run.locked())
        except ResumeError as error:
            raise running from error
        yield


def remove(found: Sequence[Removal]) -> None:
    """COMMITTED goes first, so that a removal cut short leaves nothing that looks whole."""
    for item in found:
        if item.path.is_dir():
            (item.path / COMMITTED).unlink(missing_ok=True)
            shutil.rmtree(item.path)
        else:
            item.path.unlink(missing_ok=True)
