"""The memory of a plan as a table: a line for each part, a column for each stage of a step, the fullest stage, and what is left."""

from __future__ import annotations

from rftcli.plan.plan import Plan
from rftcli.plan.plan_memory import STAGES, MemoryRow

SHOWN_FROM_GIB = 0.005
"""Less is an empty cell."""


def memory_lines(plan: Plan) -> list[str]:
    """Empty where the plan does not know."""
    table = plan.memory
    if table is None:
        return []
    whose = "memory of a GPU" if plan.world.device == "cuda" else "a rank's share of the machine's memory"
    stage, peak = table.peak
    left = table.usable_gib - peak
    verdict = f"{left:.2f} GiB left" if table.fits else f"{-left:.2f} GiB too much"
    lines = [
        f"{whose}, GiB (device {table.device_gib:.2f}, usable {table.usable_gib:.2f})",
        *_aligned([("", *STAGES), *map(_cells, table.rows), ("all", *(f"{table.total_gib(stage):.2f}" for stage in STAGES))]),
        f"peak {peak:.2f} GiB in {stage}: {verdict}",
    ]
    if table.host:
        lines += ["host memory of a rank, GiB", *_aligned([("", *STAGES), *map(_cells, table.host)])]
    return lines


def _cells(row: MemoryRow) -> tuple[str, ...]:
    sizes = (row.gib.get(stage, 0.0) for stage in STAGES)
    return (row.name, *(f"{size:.2f}" if size >= SHOWN_FROM_GIB else "." for size in sizes))


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]
