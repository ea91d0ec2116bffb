"""A rank that the others waited for in vain, named with the stage it was last in. Read from what the ranks have written; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rftcli.runtime.rundir import AttemptDir

TIMED_OUT = ("Timed out waiting", "collective operation timeout", "Timeout waiting for")
"""What gloo and NCCL say when `launch.timeout_minutes` are over."""
SAYS = " rft: "
"""In front of what a rank tells in its log, the stage it begins among it."""
HINT = "a rank that is only slow needs a larger launch.timeout_minutes; one that hangs shows in its log, or under `py-spy dump --pid`"


def waited_in_vain(attempt: AttemptDir, records: Sequence[Mapping[str, Any]]) -> str | None:
    """Who waited and who did not come; None where no rank's own error is that it waited too long."""
    waiting = sorted(int(record["rank"]) for record in records if any(text in record["message"] for text in TIMED_OUT))
    if not waiting:
        return None
    spoken = {int(record["rank"]) for record in records}
    there = sorted(int(path.stem.removeprefix("rank_")) for path in attempt.logs.glob("rank_*.log"))
    missing = [rank for rank in there if rank not in spoken]
    waited = ", ".join(f"rank {rank} in {last_stage(attempt, rank)}" for rank in waiting)
    if not missing:
        return f"the ranks waited for each other longer than launch.timeout_minutes: {waited}\nhint: {HINT}"
    late = ", ".join(f"rank {rank}, last in {last_stage(attempt, rank)} ({attempt.log(rank)})" for rank in missing)
    return f"waited longer than launch.timeout_minutes: {waited}; what did not come: {late}\nhint: {HINT}"


def last_stage(attempt: AttemptDir, rank: int) -> str:
    """What a rank said last that it does."""
    log = attempt.log(rank)
    lines = [line for line in log.read_text(errors="replace").splitlines() if SAYS in line] if log.is_file() else []
    return f"`{lines[-1].split(SAYS, 1)[1].strip()[:60]}`" if lines else "its start"
