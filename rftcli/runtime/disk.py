"""Disks that fill up: how much a checkpoint will need, how much is left, and a full disk told in words. No torch."""

from __future__ import annotations

import contextlib
import errno
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from rftcli.errors import MachineError, RftError, words
from rftcli.plan.memory import DTYPE_BYTES, GIB
from rftcli.plan.plan import Plan

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space on the device, no quota left, a file larger than it may become."""
FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large", "file write failed", "unexpected pos")
"""How libraries tell of it without an OSError: safetensors, and torch.save in its own words."""
RESERVE_BYTES = 65_536


class Reserve:
    """A few blocks of the disk, taken while there is room and given back for the words that say why a run ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(RESERVE_BYTES))

    def release(self) -> None:
        self._path.unlink(missing_ok=True)


def is_full(error: BaseException) -> bool:
    """Does the error, or one it came from, say that a disk is full?"""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in FULL:
            return True
        if not isinstance(seen, (OSError, RftError)) and any(text in words(seen) for text in FULL_TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def told(error: BaseException, run: Path) -> BaseException:
    """The error as it was, or, where a disk is full, one that a person can act on."""
    if isinstance(error, RftError) or not is_full(error):
        return error
    where = next((name for name in (getattr(error, "filename", None),) if name), run)
    return RftError(f"no space left on the disk: {where} could not be written ({free_text(run)})", hint=way_out(run))


def way_out(run: Path) -> str:
    where = shlex.quote(str(run))
    return f"free space (`df -h {where}`); checkpoints that were committed are whole, and `rft resume {where}` goes on from the last"


def free_bytes(path: Path) -> int | None:
    """Bytes that are free where `path` lies or will lie; None where it cannot be asked."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(there)
        return usage.free if usage.total else None
    return None


def free_text(path: Path) -> str:
    free = free_bytes(path)
    return "free space unknown" if free is None else f"{size_text(free)} are free"


def size_text(count: int) -> str:
    """
    >>> size_text(0), size_text(2048), size_text(3 * 1024**3), size_text(2**53)
    ('0 B', '2.0 KiB', '3.0 GiB', '8192.0 TiB')
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def checkpoint_bytes(plan: Plan) -> int | None:
    """What a checkpoint will need: the policy in its dtype; weights, float32 master weights and two moments. None if the size is not known."""
    parameters = plan.policy.parameters
    if parameters is None:
        return None
    weights = DTYPE_BYTES[plan.policy.dtype]
    policy = weights if plan.checkpoint.save_hf else 0
    master = 4 if plan.learner.zero_stage or weights < 4 else 0
    return parameters * (policy + (weights + master + 8 if plan.checkpoint.trainer_state else 0))


def next_checkpoint_bytes(plan: Plan, before: Sequence[Path]) -> int | None:
    """What the next checkpoint will need: as much as the newest of those `before`, or what the plan says; None if nothing is known."""
    return size_of(before[-1]) if before else checkpoint_bytes(plan)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if not path.is_dir():
        return path.lstat().st_size
    return sum(item.lstat().st_size for item in path.rglob("*") if not item.is_dir() or item.is_symlink())


def check(plan: Plan, run: Path) -> list[str]:
    """Warnings about the room for this plan's checkpoints. MachineError when not even one fits."""
    need, free = checkpoint_bytes(plan), free_bytes(run)
    if need is None or free is None:
        return []
    best = plan.checkpoint.keep_best
    at_once = plan.checkpoint.keep + (0 if best is None else best.keep) + 1  # the newest is whole before the oldest goes
    if free < need:
        raise MachineError(
            f"a checkpoint needs about {size_text(need)}, and {size_text(free)} are free at {run}",
            hint="free space, give another --run-dir, or write less: `--set checkpoint.trainer_state=false`",
        )
    if plan.checkpoint.every or plan.checkpoint.every_minutes:
        most = need * at_once if plan.checkpoint.max_gib is None else min(need * at_once, int(plan.checkpoint.max_gib * GIB) + need)
        if free < most:
            text = f"checkpoints need up to {size_text(most)} ({size_text(need)} each), and {size_text(free)} are free at {run}"
            return [f"{text}: lower checkpoint.keep or set checkpoint.max_gib"]
    return []
